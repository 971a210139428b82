"""What the sandbox's child runs: it limits itself, then runs a program, or calls a function of it. Nothing else of ours is known here.

Arguments: the limits as JSON, the program's file, and the function's name if one is to be called.
"""

import json
import os
import resource
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

# The authors of LiveCodeBench give programs these: models rarely write imports for starter code.
_MODULES = (
    *(
        "string",
        "re",
        "datetime",
        "collections",
        "heapq",
        "bisect",
        "copy",
        "math",
        "random",
        "statistics",
        "itertools",
        "functools",
    ),
    *("operator", "io", "sys", "json", "builtins", "typing"),
)
_RECURSION_LIMIT = 50_000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = (
    *(
        "socket.",
        "subprocess.",
        "os.fork",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "os.kill",
        "pty.",
    ),
    "signal.pthread_kill",
)
_CHANGES = frozenset(
    f"os.{name}"
    for name in (
        "chmod",
        "chown",
        "link",
        "mkdir",
        "remove",
        "rename",
        "rmdir",
        "symlink",
        "truncate",
        "utime",
        "setxattr",
    )
)


def main() -> None:
    limits, path, *function = sys.argv[1:]
    _limit(json.loads(limits))
    source = Path(path).read_text(encoding="utf-8")
    namespace = _namespace()
    sys.setrecursionlimit(_RECURSION_LIMIT)
    sys.argv = [path]
    sys.addaudithook(_refuse_outside(os.path.realpath(os.getcwd())))
    if function:
        _call(source, namespace, function[0])
    else:
        _run(source, namespace)


def _limit(limits: dict[str, Any]) -> None:
    processes = [(resource.RLIMIT_NPROC, limits["num_processes"])] * limits["is_apart"]
    for kind, most in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["num_files"]),
        (resource.RLIMIT_CORE, 0),
        *processes,
    ):
        resource.setrlimit(kind, (most, most))


def _namespace() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    for name in _MODULES:
        module = import_module(name)
        names |= {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return names | {name: import_module(name) for name in _MODULES}


def _refuse_outside(folder: str) -> Any:
    """Return a hook that refuses network, other processes, and changes to files outside a folder."""

    def is_outside(path: object) -> bool:
        if not isinstance(path, str | bytes):
            return False
        place = os.path.realpath(os.fsdecode(path))
        return place != os.devnull and os.path.commonpath([folder, place]) != folder

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if (arguments[2] or 0) & _WRITES and is_outside(arguments[0]):
                raise PermissionError(f"the sandbox refuses to write {arguments[0]!r}")
        elif event.startswith(_REFUSED) or (event in _CHANGES and any(map(is_outside, arguments))):
            raise PermissionError(f"the sandbox refuses {event}")

    return hook


def _run(source: str, namespace: dict[str, Any]) -> None:
    with suppress(SystemExit):  # how programs end is their own: what they wrote counts
        exec(compile(source, "program.py", "exec"), namespace)


def _call(source: str, namespace: dict[str, Any], function: str) -> None:
    """Write the function's value; what the program itself writes is no answer."""
    arguments = [json.loads(line) for line in sys.stdin.read().split("\n")]
    answer, sys.stdout = sys.stdout, sys.stderr
    namespace["__name__"] = "program"  # what it would do as a script is not asked for
    _run(source, namespace)
    solution = namespace.get("Solution")
    value = (namespace[function] if solution is None else getattr(solution(), function))(*arguments)
    answer.write(json.dumps(value))


if __name__ == "__main__":
    main()
