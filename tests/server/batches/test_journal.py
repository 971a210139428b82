"""What the journal holds after a crash at any byte, and when the disk fails."""

import json
from pathlib import Path

import pytest

from server.batches.journal import Journal

ANSWERS = [
    json.dumps({"custom_id": f"r{number}", "text": "é" * number}, ensure_ascii=False).encode()
    for number in range(4)
]


def test_a_crash_at_any_byte_costs_the_torn_answer_only(tmp_path: Path) -> None:
    whole = b"".join(answer + b"\n" for answer in ANSWERS)
    for size in range(len(whole) + 1):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "output.jsonl").write_bytes(whole[:size])
        journal = Journal(folder)
        num_whole = whole[:size].count(b"\n")
        assert (journal.num_completed, journal.num_failed) == (num_whole, 0)
        assert journal.custom_ids() == {f"r{number}" for number in range(num_whole)}
        journal.append(ANSWERS[num_whole:], is_error=False)
        assert journal.output_path.read_bytes() == whole


def test_a_block_that_never_reached_the_disk_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "output.jsonl").write_bytes(ANSWERS[0] + b"\n" + bytes(50) + b"\n" + ANSWERS[1] + b"\n")
    journal = Journal(tmp_path)
    assert journal.custom_ids() == {"r0"}
    assert journal.output_path.read_bytes() == ANSWERS[0] + b"\n"


def test_answers_and_errors_are_apart_and_counted_together(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(ANSWERS[:1], is_error=False)
    journal.append(ANSWERS[1:3], is_error=True)
    for each in (journal, Journal(tmp_path)):
        assert (each.num_completed, each.num_failed) == (1, 2)
        assert each.custom_ids() == {"r0", "r1", "r2"}


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append(ANSWERS[:1], is_error=False)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space"):
            journal.append(ANSWERS[1:], is_error=False)
    assert journal.num_completed == 1
    assert journal.output_path.read_bytes() == ANSWERS[0] + b"\n"
    journal.append(ANSWERS[1:], is_error=False)
    assert Journal(tmp_path).num_completed == 4
