"""A line on the terminal that says how far a run is."""

import time
from typing import TextIO

INTERVAL = 0.2  # seconds between two states of the line


class ProgressLine:
    """Call it when a request has ended. On anything but a terminal it writes nothing."""

    def __init__(self, output: TextIO, title: str, total: int) -> None:
        self._output = output
        self._title = title
        self._total = total
        self._num_done = self._num_failed = 0
        self._start = time.monotonic()
        self._shown_until = 0.0
        self._is_shown = output.isatty()

    def __call__(self, went_well: bool) -> None:
        self._num_done += 1
        self._num_failed += not went_well
        now = time.monotonic()
        if self._is_shown and (now >= self._shown_until or self._num_done == self._total):
            self._shown_until = now + INTERVAL
            filled = 24 * self._num_done // self._total
            bar = "█" * filled + "·" * (24 - filled)
            state = f"{self._num_done}/{self._total}, {self._num_failed} failed, {now - self._start:.0f} s"
            self._output.write(f"\r{self._title} {bar} {state}\x1b[K")
            self._output.flush()

    def close(self) -> None:
        """Take the line away."""
        if self._is_shown:
            self._output.write("\r\x1b[K")
            self._output.flush()
