"""Two runs side by side."""

import json
from pathlib import Path
from typing import Any

import pytest

from commands.cli import main
from commands.eval.compare import compare
from server.options.command_line import OptionError


def write(path: Path, *runs: tuple[str, list[float]], **changes: object) -> str:
    head: dict[str, Any] = {
        "suite": "ruler",
        "seed": 0,
        "length": 100,
        "num_cases": 4,
        "pack": "before-answer",
        "chat_template": False,
    }
    listed = [
        {"label": label, "tasks": {"one": {"scores": scores}, "two": {"scores": [0.0, 100.0] * 2}}}
        for label, scores in runs
    ]
    path.write_text(json.dumps({**head, **changes, "runs": listed}))
    return str(path)


def test_differences_are_paired(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", ("low", [0.0, 20.0, 40.0, 60.0]), ("high", [10.0, 30.0, 50.0, 70.0]))
    result = compare(f"{file}#low", f"{file}#high").differences
    assert (result["one"].points, result["one"].interval) == (
        10,
        (10, 10),
    )  # unpaired, they would overlap by far
    assert result["two"].points == 0
    assert not result["two"].is_significant
    assert (result["mean"].points, result["mean"].is_significant) == (5, True)


def test_the_command_prints_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        write(tmp_path / "a.json", ("a", [0.0] * 4)),
        write(tmp_path / "b.json", ("b", [100.0, 100.0, 0.0, 100.0])),
    )
    assert main(["eval", "compare", first, second, "--json", str(tmp_path / "out.json")]) == 0
    assert "+75.0" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["differences"]["one"]["difference"] == 75


def test_runs_over_other_cases_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", ("a", [0.0] * 4))
    with pytest.raises(OptionError, match="differ in seed: 0 and 1"):
        compare(first, write(tmp_path / "b.json", ("b", [0.0] * 4), seed=1))
    two = write(tmp_path / "c.json", ("a", [0.0] * 4), ("b", [0.0] * 4))
    with pytest.raises(OptionError, match=r"has the runs a, b: name one as .*c\.json#LABEL"):
        compare(first, two)
    with pytest.raises(OptionError, match=r"differ in cases of one: 4 and 3; one was not finished"):
        compare(first, write(tmp_path / "d.json", ("a", [0.0] * 3)))
    with pytest.raises(OptionError, match="is no result"):
        compare(first, str(tmp_path / "none.json"))
