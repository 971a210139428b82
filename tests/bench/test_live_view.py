"""The benchmark of the live view runs against a real server. Its times are not checked."""

import json
from pathlib import Path

import pytest

from bench.live_view import main, table, viewer
from bench.systems.system import MeasurementError
from tests.paths import DEMO_MODEL


@pytest.mark.long
def test_a_server_is_loaded_with_and_without_a_viewer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    options = ("--rounds", "2", "--num-prompts", "8", "--no-compile", "--json", str(result))
    status = main((str(DEMO_MODEL), *options))
    document = json.loads(result.read_text())
    assert [figures["completed"] for figures in document["closed"] + document["open"]] == [8] * 4
    assert status == (0 if document["ratio"] >= 0.99 else 1)
    assert "| 2 |" in capsys.readouterr().out


def test_without_a_server_there_is_no_viewer() -> None:
    with pytest.raises(MeasurementError, match="could not open"), viewer("http://127.0.0.1:9"):
        pass


def test_the_ratio_is_the_median_of_rounds() -> None:
    closed = [{"output_throughput": value} for value in (100.0, 100.0, 200.0)]
    watched = [{"output_throughput": value} for value in (99.0, 50.0, 199.0)]
    text, ratio = table([closed, watched])
    assert ratio == 0.99
    assert "| 3 | 100.0 | 99.0 | 0.9900 | 0.500, 0.995 |" in text
