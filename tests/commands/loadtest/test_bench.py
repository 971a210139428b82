"""`snapserve bench` against snapserve's own server with the fake backend."""

import io
import json
import sys
from pathlib import Path

import pytest

from commands.cli import main
from commands.shared.progress import ProgressLine
from tests.server.serving import RunningServer


def bench(running: RunningServer, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    assert main(["bench", "--base-url", running.url, "--ignore-eos", "--json", "-", *options]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_token_prompts_have_their_exact_lengths(
    running: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--num-prompts 6 --random-input-len 50 --random-output-len 9 --max-concurrency 2"
    result = bench(running, capsys, *sizes.split())
    assert result["prompts"] == "random tokens"
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (300, 54)
    assert all(result[f"p99_{metric}_ms"] is not None for metric in ("ttft", "tpot", "itl", "e2el"))


def test_chat_prompts_are_within_a_tenth_of_the_requested_length(
    running: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--num-prompts 10 --random-input-len 200 --random-output-len 5 --request-rate 500"
    result = bench(running, capsys, "--endpoint", "/v1/chat/completions", *sizes.split())
    assert result["prompts"] == "random words"
    assert result["total_output_tokens"] == 50
    assert result["total_input_tokens"] == pytest.approx(2000, rel=0.1)


def test_prompts_are_read_from_a_file(
    running: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("The river froze.\nMarta keeps a falcon.\n")
    sizes = ("--num-prompts", "4", "--random-output-len", "3")
    result = bench(running, capsys, "--dataset-path", str(path), *sizes)
    assert (result["prompts"], result["total_output_tokens"]) == ("file", 12)


def test_refused_requests_are_counted(running: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--num-prompts", "3", "--random-input-len", "50", "--random-output-len", "5000")
    assert main(["bench", "--base-url", running.url, *options]) == 1
    assert "3 × HTTP 400" in capsys.readouterr().out


def test_a_plot_is_drawn(running: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.svg"
    options = ("--num-prompts", "3", "--random-output-len", "5", "--random-input-len", "20", "--rounds", "1")
    bench(running, capsys, *options, "--compare", running.url, "--plot", str(file))
    drawing = file.read_text()
    assert "<svg" in drawing
    assert all(
        f"<!-- {title} -->" in drawing
        for title in ("TTFT", "TPOT", "ITL", "E2EL", running.url, f"against {running.url}")
    )


def test_a_plot_without_matplotlib_is_refused_before_the_load(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--base-url", running.url, "--plot", "plot.png"]) == 2
    assert (
        "--plot must be left out where matplotlib is missing (pip install 'snapserve[bench]'"
        in capsys.readouterr().err
    )


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_nothing_elsewhere() -> None:
    terminal, file = Terminal(), io.StringIO()
    for output in (terminal, file):
        line = ProgressLine(output, "here", 2)
        line(False)
        line(True)
        line.close()
    assert "2/2, 1 failed" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert file.getvalue() == ""
