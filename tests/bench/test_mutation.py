"""Mutants differ in one place, and the tests of a clone decide whether they are killed."""

import ast
from pathlib import Path

import pytest

from bench.mutation import first_failure, mutants

SOURCE = """
def is_late(now, limit, log):
    assert now > 0
    logger.info("now")
    log.append(now)
    if now + 1 < limit and log:
        return False
    return now in limit
"""


def test_each_mutant_changes_one_operator_result_or_call() -> None:
    found = {(mutant.line, mutant.was, mutant.now) for mutant in mutants(SOURCE)}
    assert found == {
        (5, "log.append(now)", "None"),
        (6, "now + 1", "now - 1"),
        (6, "now + 1 < limit", "now + 1 <= limit"),
        (6, "now + 1 < limit and log", "now + 1 < limit or log"),
        (7, "return False", "return True"),
        (8, "now in limit", "now not in limit"),
    }
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant in mutants(SOURCE):
        lines = mutant.source.splitlines()
        assert sum(one != other for one, other in zip(plain, lines, strict=True)) == 1


@pytest.mark.parametrize(("sum_of", "failure"), [("a + b", None), ("a - b", "FAILED test_sums.py::test_sum")])
def test_the_first_failure_kills(tmp_path: Path, sum_of: str, failure: str | None) -> None:
    (tmp_path / "sums.py").write_text(f"def add(a, b):\n    return {sum_of}\n")
    (tmp_path / "test_sums.py").write_text(
        "from sums import add\ndef test_sum():\n    assert add(1, 2) == 3\n"
    )
    assert first_failure(tmp_path, ["test_sums.py"]) == failure
