"""A line on the terminal with the progress of a run."""

import time
from typing import TextIO

INTERVAL = 0.2  # seconds between two updates


class ProgressLine:
    """Call it after each request. It writes nothing unless the output is a terminal."""

    def __init__(self, output: TextIO, title: str, total: int) -> None:
        self._output = output
        self._title = title
        self._total = total
        self._num_done = 0
        self._num_failed = 0
        self._start = time.monotonic()
        self._next_update = 0.0
        self._is_shown = output.isatty()

    def __call__(self, is_success: bool) -> None:
        self._num_done += 1
        self._num_failed += not is_success
        now = time.monotonic()
        if self._is_shown and (now >= self._next_update or self._num_done == self._total):
            self._next_update = now + INTERVAL
            filled = 24 * self._num_done // self._total
            bar = "█" * filled + "·" * (24 - filled)
            state = f"{self._num_done}/{self._total}, {self._num_failed} failed, {now - self._start:.0f} s"
            self._output.write(f"\r{self._title} {bar} {state}\x1b[K")
            self._output.flush()

    def close(self) -> None:
        """Erase the line."""
        if self._is_shown:
            self._output.write("\r\x1b[K")
            self._output.flush()
