"""The command, and a whole server process from its start to its last answer."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from commands.cli import main
from server.options.command_line import OptionError, options_of
from server.options.serve import serve_groups
from server.serve import check_descriptors


def test_help_shows_every_flag_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for group in serve_groups():
        for option in options_of(group):
            is_shown = f" {option.flag} " in text or f" {option.flag}," in text
            assert (is_shown, option.variable in text) == (not group.is_hidden,) * 2, option.flag


def test_a_wrong_value_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--num-slots", "none"]) == 2
    assert "--num-slots must be a whole number" in capsys.readouterr().err


def test_an_unavailable_address_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "192.0.2.1"]) == 2
    assert "cannot listen on --host 192.0.2.1" in capsys.readouterr().err


def test_unknown_commands_and_shortened_flags_are_refused() -> None:
    for arguments in (["brew"], ["serve", "--num-slot", "3"], []):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2


def test_a_command_imports_no_other_one() -> None:
    code = "import sys; from commands.cli import make_parser; make_parser('serve'); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [name for name in modules.split() if name.startswith("commands")] == ["commands", "commands.cli"]


def test_a_closed_output_pipe_ends_the_command_quietly() -> None:
    """As in `snapserve simulate reproduce | head -1`."""
    command = [sys.executable, "-m", "server", "simulate", "reproduce"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 1


def start(*flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "server", "serve", "--backend", "fake", "--port", "0", *flags]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        # The tests may run under nohup, whose ignored SIGHUP is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_a_process_serves_drains_and_ends(sent: signal.Signals) -> None:
    with start() as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "snapserve is ready at http://127.0.0.1:" in line
        url = next(word for word in line.split() if word.startswith("http://"))
        body = {
            "model": "snapserve-demo",
            "prompt": "x",
            "max_tokens": 3000,
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            chunks = response.iter_lines()
            next(chunks)
            process.send_signal(sent)
            rest = [line for line in chunks if line]
        assert rest[-1] == "data: [DONE]"  # it was allowed to finish
        assert process.wait(timeout=30) == 0


def test_probes_answer_on_their_own_port_while_the_main_one_is_full() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with start("--max-connections", "3", "--admin-port", str(port)) as process:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        main_port = int(url.rpartition(":")[2])
        admin = f"http://127.0.0.1:{port}"
        with contextlib.ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(socket.create_connection(("127.0.0.1", main_port)))
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url}/ready")
            assert [httpx.get(f"{admin}{path}").status_code for path in ("/ready", "/health")] == [200, 200]
            assert "snapserve:refused_connections_total{" in httpx.get(f"{admin}/metrics").text
            assert httpx.get(f"{admin}/v1/models").status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_connections_need_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, changed = (200, 1000), list[tuple[int, int]]()
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    monkeypatch.setattr("resource.setrlimit", lambda _, new: changed.append(new))
    check_descriptors(100)
    assert changed == []
    check_descriptors(900)
    assert changed == [(1000, 1000)]
    with pytest.raises(OptionError, match="--max-connections 901 needs 1001 open files"):
        check_descriptors(901)


def test_a_crash_leaves_a_trace() -> None:
    with start() as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGABRT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in errors
    assert "run_process" in errors  # the stack of the main thread


def test_a_model_that_cannot_be_loaded_ends_the_process(tmp_path: Path) -> None:
    with start("--model", str(tmp_path)) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "snapserve serve: loading failed:" in errors
