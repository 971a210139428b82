"""Programs that a model wrote, run apart: limited in time, memory, files and processes, without network and environment.

It protects from accidents. A program that wants to get out can: whoever runs answers of a model that may be hostile runs the evaluation
in a container or a virtual machine. `sandboxed.py` is what the child runs.
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
_NAMESPACES = ("--user", "--map-current-user", "--net", "--pid", "--ipc", "--fork", "--kill-child")


class Isolation(StrEnum):
    """What keeps a program from the network and other processes."""

    NAMESPACES = "namespaces"  # the kernel: it has no network, sees no other process, and all that it started ends with it
    HOOK = "audit hook"  # the interpreter refuses sockets and processes; code outside Python could have them


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """`wall_seconds` ends a program that waits rather than works. Output is a file, and limited as one."""

    cpu_seconds: int = 6
    wall_seconds: float = 12.0
    memory_bytes: int = 4 << 30
    file_bytes: int = 32 << 20
    num_processes: int = (
        64  # threads count; in namespaces only, and not of root: elsewhere the hook refuses processes
    )
    num_files: int = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """`is_done`: the program came to its end. `error` is the end of what it said otherwise."""

    is_done: bool
    output: str
    error: str


class Sandbox:
    """Runs programs. Safe to use from several threads."""

    def __init__(self, limits: SandboxLimits | None = None, isolation: Isolation | None = None) -> None:
        self._limits, self._isolation = limits or SandboxLimits(), isolation

    @property
    def isolation(self) -> Isolation:
        return self._isolation or _best_isolation()

    def run(self, program: str, given: str, function: str | None = None) -> Outcome:
        """Run a program with this standard input; with a `function`, call it with an argument a line and return its value as JSON."""
        with (
            tempfile.TemporaryDirectory(prefix="snapserve-") as folder,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as error,
        ):
            source = Path(folder, "program.py")
            source.write_text(program, encoding="utf-8", errors="replace")
            with tempfile.TemporaryFile() as stdin:
                stdin.write(given.encode(errors="replace"))
                stdin.seek(0)
                code = self._wait(self._command(source, function), Path(folder), stdin, output, error)
            told = _read(error)[-2000:]
            ended = (
                told or f"ended by signal {-code}"
                if code is not None
                else f"took more than {self._limits.wall_seconds:g} s"
            )
            return Outcome(code == 0, _read(output), "" if code == 0 else ended)

    def _command(self, source: Path, function: str | None) -> tuple[str, ...]:
        is_apart = self.isolation is Isolation.NAMESPACES
        limits = json.dumps(asdict(self._limits) | {"is_apart": is_apart})
        python = (
            sys.executable,
            "-I",
            "-B",
            "-X",
            "utf8",
            str(_CHILD),
            limits,
            str(source),
            *([function] if function else []),
        )
        return (*_unshare(), *python) if is_apart else python

    def _wait(
        self, command: tuple[str, ...], folder: Path, stdin: IO[bytes], output: IO[bytes], error: IO[bytes]
    ) -> int | None:
        """Return the exit status; None for a program that took too long. Nothing of its process group is left."""
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
    """Return the strongest that this machine allows."""
    try:
        done = subprocess.run(
            [*_unshare(), sys.executable, "-I", "-c", ""], capture_output=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return Isolation.HOOK
    return Isolation.HOOK if done.returncode else Isolation.NAMESPACES
