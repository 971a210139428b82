"""The sandbox's child process: it limits itself, then runs a program or calls a function of it.

It imports only the standard library. Arguments: the limits as JSON, the program's file, and optionally the
name of the function to call.
"""

import json
import os
import resource
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

# LiveCodeBench imports these for every program, because models rarely write imports for starter code.
_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
)
_RECURSION_LIMIT = 50_000
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events (the beginnings of their names) of the network and of other processes: always refused.
_REFUSED_EVENTS = (
    "socket.",
    "subprocess.",
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.kill",
    "pty.",
    "signal.pthread_kill",
)
# Audit events that change files: refused outside of the program's folder.
_CHANGE_EVENTS = frozenset(
    {
        "os.chmod",
        "os.chown",
        "os.link",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.symlink",
        "os.truncate",
        "os.utime",
        "os.setxattr",
    }
)


def main() -> None:
    limits, path, *function = sys.argv[1:]
    _set_limits(json.loads(limits))
    source = Path(path).read_text(encoding="utf-8")
    namespace = _namespace()
    sys.setrecursionlimit(_RECURSION_LIMIT)
    sys.argv = [path]
    sys.addaudithook(_refuse_outside(os.path.realpath(os.getcwd())))
    if function:
        _call(source, namespace, function[0])
    else:
        _run(source, namespace)


def _set_limits(limits: dict[str, Any]) -> None:
    limit_of = {
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["num_files"],
        resource.RLIMIT_CORE: 0,
    }
    if limits["has_namespaces"]:
        # Without a user namespace the limit would count all processes of the user, not only the program's.
        limit_of[resource.RLIMIT_NPROC] = limits["num_processes"]
    for kind, limit in limit_of.items():
        resource.setrlimit(kind, (limit, limit))


def _namespace() -> dict[str, Any]:
    """Return the program's global names: the modules, and all of their public names."""
    modules = {name: import_module(name) for name in _MODULES.split()}
    names: dict[str, Any] = {"__name__": "__main__"}
    for module in modules.values():
        names |= {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return names | modules


def _refuse_outside(folder: str) -> Any:
    """Return an audit hook that refuses network, other processes, and changes to files outside a folder."""

    def is_outside(path: object) -> bool:
        if not isinstance(path, str | bytes):
            return False
        resolved = os.path.realpath(os.fsdecode(path))
        return resolved != os.devnull and os.path.commonpath([folder, resolved]) != folder

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if (flags or 0) & _WRITE_FLAGS and is_outside(path):
                raise PermissionError(f"the sandbox refuses to write {path!r}")
        elif event.startswith(_REFUSED_EVENTS) or (
            event in _CHANGE_EVENTS and any(map(is_outside, arguments))
        ):
            raise PermissionError(f"the sandbox refuses {event}")

    return hook


def _run(source: str, namespace: dict[str, Any]) -> None:
    with suppress(SystemExit):  # a program may end with any status: only its output counts
        exec(compile(source, "program.py", "exec"), namespace)


def _call(source: str, namespace: dict[str, Any], function: str) -> None:
    """Call a function of the program, or of its class `Solution`, and write its value to standard output."""
    arguments = [json.loads(line) for line in sys.stdin.read().split("\n")]
    output = sys.stdout
    sys.stdout = sys.stderr  # what the program prints is not its answer
    namespace["__name__"] = "program"  # so that code under `if __name__ == "__main__"` does not run
    _run(source, namespace)
    solution = namespace.get("Solution")
    call = namespace[function] if solution is None else getattr(solution(), function)
    output.write(json.dumps(call(*arguments)))


if __name__ == "__main__":
    main()
