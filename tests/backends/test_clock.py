"""The clock of what expires by date."""

from pathlib import Path

import pytest

from backends.clock import CalendarClock
from tests.server.batches.inputs import batches_in


def test_a_calendar_that_jumps_expires_nothing() -> None:
    calendar, elapsed = 1e9, 50.0
    clock = CalendarClock(lambda: calendar, lambda: elapsed)
    assert clock.now() == 1e9
    calendar += 1e6  # ten days
    assert clock.now() == 1e9
    elapsed += 3.0
    assert clock.now() == 1e9 + 3


def test_files_and_batches_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with batches_in(tmp_path) as batches:
        before = batches.now()
        monkeypatch.setattr("time.time", lambda: before + 1e6)
        assert batches.now() < before + 100
