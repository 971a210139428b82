"""A short soak, with everything that the long one has, and the books that it keeps."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.soak.__main__ import main
from bench.soak.ledger import Ending, Ledger, Outcome
from bench.soak.run import memory_checks


def test_every_request_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result_file, picture = tmp_path / "soak.json", tmp_path / "soak.svg"
    status = main(
        ["--minutes", "0.5", "--json", str(result_file), "--plot", str(picture), "--", "--inner", "fake"]
    )
    told = capsys.readouterr()
    assert status == 0, told.out
    result = json.loads(result_file.read_text())
    assert sum(result["outcomes"].values()) == result["sent"]
    assert set(result["outcomes"]) == set(Outcome), "a soak without one of them shows little"
    assert len(result["by_kind"]) == 13
    assert "soak" in told.err
    assert picture.read_text().startswith("<?xml")


def ledger() -> Ledger:
    """One request answered with 5 tokens, one given up, one refused."""
    books = Ledger()
    for ending in (
        Ending("chat", Outcome.ANSWERED, 200, 1, 8, Counter(stop=1), 5, 3),
        Ending("chat", Outcome.CANCELLED, None, 2, 8),
        Ending("chat", Outcome.REFUSED, 429, 1, 8),
    ):
        books.sent()
        books.ended(ending)
    return books


RIGHT = {
    "http:200": 1.0,
    "http:429": 1.0,
    "http:499": 1.0,
    "outcome:stop": 1.0,
    "outcome:abort": 2.0,
    "generation_tokens": 9.0,
}
RIGHT |= {"prompt_tokens": 3.0} | {
    f"held:{name}": 0.0 for name in ("running", "waiting", "unfinished", "slots", "scratch")
}


def wrong(found: dict[str, float]) -> list[str]:
    return [check.name for check in ledger().checks({}, found) if not check.holds]


def test_right_books_balance() -> None:
    assert wrong(RIGHT) == []


@pytest.mark.parametrize(
    "change",
    [
        {"http:499": 2.0},
        {"http:200": 0.0, "http:499": 2.0},
        {"http:500": 2.0},
        {"outcome:stop": 0.0},
        {"outcome:abort": 3.0},
        {"generation_tokens": 4.0},
        {"generation_tokens": 22.0},
        {"prompt_tokens": 2.0},
        {"lines:failed": 1.0},
        {"held:slots": 1.0},
    ],
)
def test_wrong_books_do_not(change: dict[str, float]) -> None:
    assert wrong(RIGHT | change)


@pytest.mark.parametrize(("growth", "holds"), [(0, True), (30, True), (100, False)])
def test_memory_that_grows_is_noticed(growth: int, holds: bool) -> None:
    (check,) = memory_checks([(second, (400 + growth * second / 100) * 2**20) for second in range(101)], 100)
    assert check.holds is holds
