"""The benchmark of the live view runs against a real server. Its times are not checked."""

import json
import os
import sys
from pathlib import Path

import pytest

from bench.live_view import main, processor_seconds, table, viewer
from bench.systems.servers import Server, serving
from bench.systems.system import MeasurementError
from tests.e2e.process import serve
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


def test_processor_time_is_that_of_the_server(tmp_path: Path) -> None:
    with serve("--backend", "fake", log=tmp_path / "log") as server:
        before, reported, after = (
            measured_seconds(server.process.pid),
            processor_seconds(server.url),
            measured_seconds(server.process.pid),
        )
    assert 0.1 < before - 0.001 < reported < after + 0.001, "sums of hundredths are rounded"


def measured_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("files", "message"),
    [({}, "metrics could not be read"), ({"metrics": "up 1\n"}, "does not report its processor time")],
)
def test_a_server_without_processor_time_cannot_be_measured(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command = (sys.executable, "-m", "http.server", "{port}", "--directory", str(tmp_path))
    with (
        serving(Server("files", command, "/"), tmp_path / "log") as (url, _),
        pytest.raises(MeasurementError, match=message),
    ):
        processor_seconds(url)
