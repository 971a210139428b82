"""The command line: every answer says that it is simulated, and what cannot be is said plainly."""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import pytest

from server.options import OptionError
from server.simulate import configure, run


def ask(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    configure(parser)
    return run(parser.parse_args(arguments))


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    ask(*arguments, "--json")
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert values["simulated"] is True
    return values


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--context", "8192"),
        ("sweep", "--batches", "1", "--contexts", "8192", "--sockets", "16"),
        ("step", "--model", "deepseek-r1"),
        ("replay", "--requests", "20", "--rate", "5", "--shape", "poisson"),
        ("reproduce",),
    ],
)
def test_every_answer_says_that_it_is_simulated(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert ask(*arguments) == 0
    assert capsys.readouterr().out.startswith("simulated: true\n")


def test_plan_names_the_cheapest_and_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("plan", "--model", "deepseek-r1", "--context", "131072", "--slot-capacity", "32768", "--policy", "snapstream")
    best, *_ = asked(capsys, *options)["options"]
    assert (best["num_sockets"], best["num_slots"], best["policy"]) == (16, 64, "snapstream")
    assert best["bytes_per_socket"]["HBM"]["slots"] == pytest.approx(9.2e9, rel=0.01)
    assert ask(*options, "--max-tpot", "0.000001") == 1


def test_sweep_has_a_row_a_combination(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "sweep.png"
    rows = asked(capsys, "sweep", "--model", "deepseek-r1", "--batches", "1,64", "--contexts", "131072", "--plot", str(plot))["rows"]
    assert len(rows) == 2 * 2 * 2 * 2
    assert any(row.get("missing_bytes_per_socket", 0) > 1e9 for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_step_writes_a_trace_of_the_same_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    values = asked(capsys, "step", "--model", "deepseek-r1", "--batch", "64", "--slot-capacity", "32768", "--trace", str(trace))
    written = json.loads(trace.read_text())
    assert written["otherData"]["simulated"] is True
    assert max(event.get("ts", 0) + event.get("dur", 0) for event in written["traceEvents"]) == pytest.approx(1e6 * values["seconds"])
    assert asked(capsys, "step", "--prefill", "4096")["seconds"] > 0


def test_replay_reads_a_trace_and_writes_its_series(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, series = tmp_path / "trace.jsonl", tmp_path / "series.csv"
    trace.write_text(
        "".join(json.dumps({"timestamp": 1000 * index, "input_length": 50, "output_length": 20}) + "\n" for index in range(150))
    )
    values = asked(capsys, "replay", "--trace", str(trace), "--series", str(series), "--plot", str(tmp_path / "replay.png"))
    assert (values["requests"], values["output_tokens"]) == (150, 3000)
    assert values["simulated_seconds"] == pytest.approx(149, abs=1)
    assert 0 < values["tpot_seconds"]["p50"] <= values["tpot_seconds"]["p99"]
    with series.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["simulated_seconds"]) for row in rows] == [0.0, 60.0, 120.0]


def test_reproduce_fails_when_a_figure_is_missed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = asked(capsys, "reproduce", "--plots", str(tmp_path))["figures"]
    assert len(figures) > 60
    assert len(list(tmp_path.glob("*.png"))) == 5
    assert ask("reproduce", "--strict") == 1
    assert "known miss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--model", "gpt-9"), "no model 'gpt-9'"),
        (("plan", "--model", "llama-3.1-405b", "--machine", "dgx-h100"), "GB are missing"),
        (("replay", "--trace", "/nowhere.jsonl"), "nowhere.jsonl"),
        (("replay", "--sockets", "17"), "1 to 16 sockets, got 17"),
        (("replay", "--model", "llama-3.1-405b", "--sockets", "8"), "does not fit into HBM"),
        (("sweep", "--slot-capacity", "3"), "too small"),
    ],
)
def test_what_cannot_be_is_an_option_error(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ask(*arguments)
