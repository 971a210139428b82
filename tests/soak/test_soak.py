"""A short soak with all kinds of requests and endings, and the counts that a soak checks."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.soak.__main__ import main
from bench.soak.ledger import Ending, Ledger, Outcome
from bench.soak.run import memory_checks


def test_every_request_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result_file = tmp_path / "soak.json"
    picture = tmp_path / "soak.svg"
    server_options = ("--inner", "fake", "--fault", "failed-step=100:2")
    status = main(
        ["--minutes", "0.15", "--json", str(result_file), "--plot", str(picture), "--", *server_options]
    )
    printed = capsys.readouterr()
    assert status == 0, printed.out
    result = json.loads(result_file.read_text())
    assert sum(result["outcomes"].values()) == result["sent"]
    assert set(result["outcomes"]) == set(Outcome) - {Outcome.LOST}, "a soak needs every outcome"
    assert len(result["by_kind"]) == 15
    assert "soak" in printed.err
    assert picture.read_text().startswith("<?xml")


@pytest.mark.long
@pytest.mark.redis
def test_killed_replicas_lose_and_double_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (Debian: apt-get install redis-server)")
    result_file = tmp_path / "soak.json"
    options = ("--replicas", "2", "--minutes", "0.5", "--kill-interval", "8", "--json", str(result_file))
    status = main(options)
    assert status == 0, capsys.readouterr().out
    result = json.loads(result_file.read_text())
    assert sum(result["outcomes"].values()) == result["sent"]
    assert result["num_kills"] >= 1
    assert result["outcomes"][Outcome.LOST] >= 1
    assert result["batch_lines"]["completed"] >= 20
    assert len(result["servers"]) == 2


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
        {"held:slots": 1.0},
    ],
)
def test_differing_counts_fail(change: dict[str, float]) -> None:
    assert failed_checks(MATCHING | change)


def test_lines_that_no_client_saw_fail() -> None:
    assert [check.holds for check in ledger().line_checks({}, {"lines:failed": 1.0})] == [True, False]


def test_a_lost_request_is_counted_by_no_server_that_it_did_not_reach() -> None:
    counts = ledger()
    counts.sent()
    counts.ended(Ending("chat", Outcome.LOST, num_sequences=1, max_tokens=8, has_arrived=False))
    assert [check.name for check in counts.checks({}, MATCHING) if not check.holds] == []
    assert counts.sum_check().holds
    total = Ledger()
    total.add(counts)
    assert (total.sum_check().found, total.outcomes[Outcome.LOST]) == (4, 1)


def answer(custom_id: str) -> dict[str, Any]:
    body = {
        "choices": [{"finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3},
    }
    return {"custom_id": custom_id, "response": {"status_code": 200, "body": body}}


@pytest.mark.parametrize(
    ("status", "completed", "failed", "num_counted", "faults"),
    [
        ("completed", "ab", "c", 2, {}),
        ("completed", "a", "c", 1, {"lost"}),
        ("cancelled", "a", "", 1, {}),
        ("completed", "abb", "c", 3, {"doubled"}),
        ("completed", "abc", "c", 3, {"doubled"}),
        ("cancelled", "ab", "", 1, {"miscounted"}),
    ],
)
def test_lines_of_batches(
    status: str, completed: str, failed: str, num_counted: int, faults: set[str]
) -> None:
    counts = Ledger()
    batch = {
        "status": status,
        "request_counts": {"total": 3, "completed": num_counted, "failed": len(failed)},
    }
    answers = {"completed": [answer(name) for name in completed], "failed": [answer(name) for name in failed]}
    counts.ended_batch(batch, answers, set("abc"))
    assert {name for name, number in counts.faults.items() if number} == set(faults)
    assert sum(not check.holds for check in counts.fault_checks()) == len(faults)
    assert counts.num_lines.total() == len(completed) + len(failed)


@pytest.mark.parametrize(("growth", "holds"), [(0, True), (30, True), (100, False)])
def test_growing_memory_fails(growth: int, holds: bool) -> None:
    (check,) = memory_checks([(second, (400 + growth * second / 100) * 2**20) for second in range(101)], 100)
    assert check.holds is holds
