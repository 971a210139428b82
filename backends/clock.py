"""The clocks of the scheduler, the statistics and the arrivals.

No layer above reads the operating system's clock. The same scheduler can therefore serve real traffic on the
wall clock, a simulated accelerator at its pace, and a day of traffic in seconds.
"""

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary origin, never going back."""

    def now(self) -> float:
        """Return the current time in seconds."""
        ...

    def elapse(self, seconds: float) -> None:
        """Let `seconds` of this clock pass. A simulated step of that length ends when this returns."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def elapse(self, seconds: float) -> None:
        time.sleep(seconds)


class CalendarClock:
    """Seconds since 1970, by the machine's calendar when this was made and its monotonic clock since.

    When the calendar is set to another date, what expires by this clock does not.
    """

    def __init__(
        self, calendar: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        self._elapsed = elapsed
        self._origin = calendar() - elapsed()

    def now(self) -> float:
        return self._origin + self._elapsed()


class VirtualClock:
    """A clock that only `elapse` moves: it never waits, and every run has the same result."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def elapse(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: {seconds} s")
        self._now += seconds


class PacedClock:
    """The wall clock, `time_scale` times as fast: `time_scale` seconds of this clock are one real second."""

    def __init__(self, time_scale: float = 1.0) -> None:
        if not time_scale > 0:
            raise ValueError(f"time_scale must be above 0, got {time_scale}")
        self._time_scale = time_scale

    def now(self) -> float:
        return time.monotonic() * self._time_scale

    def elapse(self, seconds: float) -> None:
        time.sleep(seconds / self._time_scale)
