"""Runs programs that a model wrote in a child process with limited time, memory, files and processes.

The child has no network and an empty environment. This protects from accidents, not from attacks: a hostile
program can escape. Run the evaluation of a model that may be hostile in a container or a virtual machine. The
child's own code is in `sandboxed.py`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import IO

_CHILD = Path(__file__).with_name("sandboxed.py")
_MAX_ERROR_CHARACTERS = 2000
_NAMESPACES = ("--user", "--map-current-user", "--net", "--pid", "--ipc", "--fork", "--kill-child")


class Isolation(StrEnum):
    """The mechanism that keeps a program from the network and from other processes.

    With namespaces the kernel enforces it: the program has no network and sees no other process, and all
    processes that it started end with it. With the audit hook the interpreter refuses sockets and processes;
    native code can still open them.
    """

    NAMESPACES = "namespaces"
    HOOK = "audit hook"


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of one program. Its output is written to a file, so `file_bytes` limits it too.

    `num_processes` includes threads. It holds in namespaces only, and not for root. The audit hook refuses
    processes altogether.
    """

    cpu_seconds: int = 6
    wall_seconds: float = 12.0  # for a program that waits instead of computing
    memory_bytes: int = 4 << 30
    file_bytes: int = 32 << 20
    num_processes: int = 64
    num_files: int = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program.

    `is_done` says whether it ended normally; otherwise `error` has its last output.
    """

    is_done: bool
    output: str
    error: str


class Sandbox:
    """Runs programs. Safe to use from several threads."""

    def __init__(self, limits: SandboxLimits | None = None, isolation: Isolation | None = None) -> None:
        self._limits = limits or SandboxLimits()
        self._isolation = isolation

    @property
    def isolation(self) -> Isolation:
        """The requested isolation, or the strongest that this machine allows."""
        return self._isolation or _best_isolation()

    def run(self, program: str, input_text: str, function: str | None = None) -> Outcome:
        """Run a program with `input_text` as its standard input.

        With a `function`, call that function of the program instead. Each line of the input is one argument
        as JSON, and the output is the returned value as JSON.
        """
        with (
            tempfile.TemporaryDirectory(prefix="snapserve-") as folder,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as error,
        ):
            source = Path(folder, "program.py")
            source.write_text(program, encoding="utf-8", errors="replace")
            with tempfile.TemporaryFile() as stdin:
                stdin.write(input_text.encode(errors="replace"))
                stdin.seek(0)
                code = self._run(self._command(source, function), Path(folder), stdin, output, error)
            return Outcome(code == 0, _read(output), self._error(code, _read(error)))

    def _error(self, code: int | None, errors: str) -> str:
        if code == 0:
            return ""
        if code is None:
            return f"took more than {self._limits.wall_seconds:g} s"
        return errors[-_MAX_ERROR_CHARACTERS:] or f"ended by signal {-code}"

    def _command(self, source: Path, function: str | None) -> tuple[str, ...]:
        has_namespaces = self.isolation is Isolation.NAMESPACES
        limits = json.dumps(asdict(self._limits) | {"has_namespaces": has_namespaces})
        # -I and -B: no environment, no user packages, no bytecode files.
        python = (sys.executable, "-I", "-B", "-X", "utf8")
        child = (*python, str(_CHILD), limits, str(source), *([function] if function else []))
        return (*_unshare(), *child) if has_namespaces else child

    def _run(
        self, command: tuple[str, ...], folder: Path, stdin: IO[bytes], output: IO[bytes], error: IO[bytes]
    ) -> int | None:
        """Run the command to its end, and kill its process group.

        Return the exit status, None for a timeout.
        """
        child = subprocess.Popen(
            command, stdin=stdin, stdout=output, stderr=error, cwd=folder, env={}, start_new_session=True
        )
        try:
            return child.wait(self._limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _unshare() -> tuple[str, ...]:
    return (shutil.which("unshare") or "unshare", *_NAMESPACES)


@cache
def _best_isolation() -> Isolation:
    """Return the strongest isolation that this machine allows."""
    try:
        done = subprocess.run(
            [*_unshare(), sys.executable, "-I", "-c", ""], capture_output=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return Isolation.HOOK
    return Isolation.HOOK if done.returncode else Isolation.NAMESPACES
