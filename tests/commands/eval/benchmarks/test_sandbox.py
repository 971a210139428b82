"""Each limit of the sandbox, under every isolation this machine allows: a program exceeds it."""

import socket
from pathlib import Path

import pytest

from commands.eval.benchmarks.sandbox import Isolation, Outcome, Sandbox, SandboxLimits

SMALL = SandboxLimits(cpu_seconds=1, wall_seconds=20, memory_bytes=512 << 20, file_bytes=1 << 20)


@pytest.fixture(params=sorted({Isolation.HOOK, Sandbox().isolation}))
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return Sandbox(SMALL, request.param)


def refused(outcome: Outcome, error: str) -> None:
    assert not outcome.is_done
    assert error in outcome.error


def test_a_program_reads_and_writes(sandbox: Sandbox) -> None:
    outcome = sandbox.run(
        "print(sum(map(int, input().split())), len(Counter('aab')))", "1 2 3\n"
    )  # Counter: as in the contest
    assert outcome == Outcome(True, "6 2\n", "")


def test_a_function_is_called(sandbox: Sandbox) -> None:
    program = (
        "print('noise')\nclass Solution:\n    def add(self, a: List[int], b: int):\n"
        "        print(a)\n        return (sum(a), b)"
    )
    assert sandbox.run(program, '[1, 2]\n"x"', "add") == Outcome(True, '[3, "x"]', "")
    assert sandbox.run("def add(a): return a", "5", "add").output == "5"


def test_an_exit_is_an_end_and_an_exception_is_not(sandbox: Sandbox) -> None:
    assert sandbox.run("print(1)\nexit(3)", "").is_done
    refused(sandbox.run("1 / 0", ""), "ZeroDivisionError")
    refused(sandbox.run("def (", ""), "SyntaxError")
    refused(sandbox.run("x = 1", "1", "missing"), "KeyError: 'missing'")


def test_a_program_that_computes_forever_is_ended(sandbox: Sandbox) -> None:
    assert not sandbox.run("while True: pass", "").is_done


def test_a_program_that_waits_forever_is_ended() -> None:
    waiting = Sandbox(SandboxLimits(wall_seconds=2))
    refused(waiting.run("import time\ntime.sleep(3600)", ""), "took more than 2 s")


def test_memory_is_limited(sandbox: Sandbox) -> None:
    refused(sandbox.run("x = bytearray(1 << 30)", ""), "MemoryError")


def test_output_and_files_are_limited(sandbox: Sandbox) -> None:
    outcome = sandbox.run("while True: print('x' * 1000)", "")
    assert not outcome.is_done
    assert len(outcome.output) <= SMALL.file_bytes
    refused(sandbox.run("open('big', 'wb').write(bytes(1 << 22))", ""), "File too large")


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import os\nos.kill(1, 0)",
    ],
)
def test_other_processes_are_refused(sandbox: Sandbox, program: str) -> None:
    refused(sandbox.run(program, ""), "PermissionError: the sandbox refuses")


def test_the_network_is_refused(sandbox: Sandbox) -> None:
    refused(
        sandbox.run("import socket\nsocket.create_connection(('127.0.0.1', 9))", ""),
        "the sandbox refuses socket.",
    )


def test_in_namespaces_there_is_no_network_even_past_the_hook() -> None:
    """A socket through the C library bypasses the audit hook. Only isolation by the kernel refuses it."""
    connect = """
import ctypes, struct
libc = ctypes.CDLL(None)
place = libc.socket(2, 1, 0)
address = struct.pack("<H", 2) + struct.pack(">H", {port}) + bytes([127, 0, 0, 1]) + bytes(8)
print(libc.connect(place, address, 16))
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = Sandbox().run(connect.format(port=server.getsockname()[1]), "")
    assert outcome.output.strip() == ("-1" if Sandbox().isolation is Isolation.NAMESPACES else "0"), outcome


def test_files_are_written_in_its_own_folder_only(sandbox: Sandbox, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    assert (
        sandbox.run(
            "import os\nopen('a', 'w').write('x')\nos.rename('a', 'b')\nprint(open('b').read())", ""
        ).output
        == "x\n"
    )
    for program in (
        f"open({str(kept)!r}, 'w')",
        f"import os\nos.remove({str(kept)!r})",
        f"import os\nos.mkdir({str(tmp_path / 'new')!r})",
    ):
        refused(sandbox.run(program, ""), "PermissionError: the sandbox refuses")
    assert kept.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [kept]


def test_the_sandbox_environment_is_empty(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    assert "SECRET_OF_MINE" not in sandbox.run("import os\nprint(dict(os.environ))", "").output
