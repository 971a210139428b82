"""A short soak with all kinds of requests and endings, and the counts that a soak checks."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.soak.__main__ import main
from bench.soak.ledger import Ending, Ledger, Outcome
from bench.soak.run import memory_checks


@pytest.mark.parametrize(
    ("minutes", "steps_to_fault"), [("0.15", "100"), pytest.param("0.5", "500", marks=pytest.mark.long)]
)
def test_every_request_is_accounted_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], minutes: str, steps_to_fault: str
) -> None:
    result_file = tmp_path / "soak.json"
    picture = tmp_path / "soak.svg"
    server_options = ("--inner", "fake", "--fault", f"failed-step={steps_to_fault}:2")
    status = main(
        ["--minutes", minutes, "--json", str(result_file), "--plot", str(picture), "--", *server_options]
    )
    printed = capsys.readouterr()
    assert status == 0, printed.out
    result = json.loads(result_file.read_text())
    assert sum(result["outcomes"].values()) == result["sent"]
    assert set(result["outcomes"]) == set(Outcome), "a soak needs every outcome"
    assert len(result["by_kind"]) == 13
    assert "soak" in printed.err
    assert picture.read_text().startswith("<?xml")


def ledger() -> Ledger:
    """Return the counts of one request answered with 5 tokens, one cancelled and one refused."""
    counts = Ledger()
    for ending in (
        Ending("chat", Outcome.ANSWERED, 200, 1, 8, Counter(stop=1), 5, 3),
        Ending("chat", Outcome.CANCELLED, None, 2, 8),
        Ending("chat", Outcome.REFUSED, 429, 1, 8),
    ):
        counts.sent()
        counts.ended(ending)
    return counts


MATCHING = {
    "http:200": 1.0,
    "http:429": 1.0,
    "http:499": 1.0,
    "outcome:stop": 1.0,
    "outcome:abort": 2.0,
    "generation_tokens": 9.0,
}
MATCHING |= {"prompt_tokens": 3.0} | {
    f"held:{name}": 0.0 for name in ("running", "waiting", "unfinished", "slots", "scratch")
}


def failed_checks(found: dict[str, float]) -> list[str]:
    return [check.name for check in ledger().checks({}, found) if not check.holds]


def test_matching_counts_hold() -> None:
    assert failed_checks(MATCHING) == []


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
def test_differing_counts_fail(change: dict[str, float]) -> None:
    assert failed_checks(MATCHING | change)


@pytest.mark.parametrize(("growth", "holds"), [(0, True), (30, True), (100, False)])
def test_growing_memory_fails(growth: int, holds: bool) -> None:
    (check,) = memory_checks([(second, (400 + growth * second / 100) * 2**20) for second in range(101)], 100)
    assert check.holds is holds
