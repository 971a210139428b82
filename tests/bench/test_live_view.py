"""The benchmark of the live view runs against a real server. Its times are not checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.live_view import main, processor_seconds, table, viewer
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
    assert status == (0 if document["ratio"] <= 1.01 else 1)
    assert all(0 < each["processor_seconds_per_token"] < 1 for each in document["closed"] + document["open"])
    assert "median of 2 rounds" in capsys.readouterr().out


def test_without_a_server_there_is_no_viewer() -> None:
    with pytest.raises(MeasurementError, match="could not open"), viewer("http://127.0.0.1:9"):
        pass


def test_the_ratio_is_the_median_of_rounds() -> None:
    closed = [
        {"output_throughput": value, "processor_seconds_per_token": 0.002} for value in (100.0, 100.0, 200.0)
    ]
    watched = [
        {"output_throughput": value, "processor_seconds_per_token": seconds}
        for value, seconds in ((99.0, 0.002), (50.0, 0.003), (199.0, 0.0025))
    ]
    text, ratio = table([closed, watched])
    assert ratio == 1.25
    assert "| tokens/s | 100 | 99 | 0.9900 | 0.500, 0.995 |" in text
    assert "| processor time of a token (ms) | 2 | 2.5 | 1.2500 | 1.000, 1.500 |" in text


def test_processor_time_is_that_of_the_process() -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.25 < processor_seconds(process.pid) < 10
        process.kill()
