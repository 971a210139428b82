import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.peers import Row, compare, table
from bench.systems.servers import Server, serving
from bench.systems.system import HttpServer, MeasurementError, OwnEngine, System
from commands.loadtest.config import Address, Load
from commands.loadtest.report import Figure
from tests.commands.loadtest.scripted import Reply, scripted, whole

LOAD = Load(num_prompts=3, input_len=20, output_len=6, max_concurrency=2, seed=4)


@dataclass
class Scripted:
    """A system with given figures, one for each round."""

    throughputs: list[float]
    seeds: list[int] = field(default_factory=list)

    def measure(self, load: Load) -> Mapping[str, Figure]:
        self.seeds.append(load.seed)
        return {"output_throughput": self.throughputs[load.seed - 4], "failed": 0}


class Broken:
    def measure(self, load: Load) -> Mapping[str, Figure]:  # noqa: ARG002
        raise MeasurementError("no engine\nhere")


def test_systems_get_equal_seeds_and_ratios_are_of_one_round() -> None:
    ours = Scripted([10.0, 40.0, 90.0])
    theirs = Scripted([10.0, 10.0, 30.0])
    others: list[tuple[str, System]] = [("theirs", theirs), ("broken", Broken())]
    row, broken = compare("short", LOAD, [("ours", ours)], others, 3)
    assert broken.error == "no engine\nhere"
    assert ours.seeds == theirs.seeds == [4, 5, 6]
    assert (row.our_medians["output_throughput"], row.their_medians["output_throughput"]) == (40, 10)
    assert row.ratios["output_throughput"] == 3
    assert "| 40 / 10 = **3.00** | - / - | - / - | 0 / 0 |" in table([row])


@pytest.mark.parametrize(("ours", "theirs"), [(Scripted([1.0]), Broken()), (Broken(), Scripted([1.0]))])
def test_failed_system_reports_its_error(ours: System, theirs: System) -> None:
    (row,) = compare("short", LOAD, [("ours", ours)], [("theirs", theirs)], 1)
    assert row.error == "no engine\nhere"
    assert "| no figures: no engine here |" in table([row])


def test_engine_without_http_serves_the_load() -> None:
    figures = OwnEngine(("--backend", "fake")).measure(LOAD)
    assert (
        figures["completed"],
        figures["failed"],
        figures["total_input_tokens"],
        figures["total_output_tokens"],
    ) == (3, 0, 60, 18)
    assert figures["seconds_to_ready"] is not None


def test_engine_that_cannot_start_raises() -> None:
    with pytest.raises(MeasurementError, match="--backend must be one of"):
        OwnEngine(("--backend", "nothing")).measure(LOAD)


def test_server_is_measured_and_its_failures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(
        lambda number, _body: Reply(whole()) if number != 2 else Reply([b"full"], status=429)
    ) as server:
        system: System = HttpServer(Address(server.url), 1.5)
        figures = system.measure(LOAD)
    assert (figures["completed"], figures["failed"], figures["seconds_to_ready"]) == (2, 1, 1.5)
    assert "1 × HTTP 429: full" in capsys.readouterr().err


def test_unreachable_server_raises() -> None:
    with scripted(lambda _number, _body: Reply(whole())) as server:
        pass
    with pytest.raises(MeasurementError, match="cannot be reached"):
        HttpServer(Address(server.url), 1.5).measure(LOAD)


def test_server_is_started_awaited_and_stopped(tmp_path: Path) -> None:
    files = Server("files", (sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"), "/")
    with serving(files, tmp_path / "log") as (url, seconds):
        assert url.startswith("http://127.0.0.1:")
        assert seconds > 0
    assert "GET / HTTP/1.1" in (tmp_path / "log").read_text()


def test_server_that_exits_at_once_raises_with_its_output(tmp_path: Path) -> None:
    broken = Server("broken", (sys.executable, "-c", "raise SystemExit('no such model')"), "/")
    with (
        pytest.raises(MeasurementError, match="broken exited with 1: no such model"),
        serving(broken, tmp_path / "log"),
    ):
        pass


def test_row_as_json_has_all_fields() -> None:
    row = Row("short", "a", "b", {"x": 1}, {"x": 2}, {"x": 0.5})
    assert row.as_json() == {
        "load": "short",
        "ours": "a",
        "theirs": "b",
        "our_medians": {"x": 1},
        "their_medians": {"x": 2},
        "ratios": {"x": 0.5},
        "error": None,
    }
