"""Builds compiled code in processes that need not import torch's compiler.

A process of `compiled.build` imports the compiler for 5 s, and its first graph fills the compiler's tables
for 1 to 5 s more. `python -m tests.backends.builder SOCKET` does both once and forks a process for each
build. `CLIENT` takes the place of `python -m backends.torch_backend.compiled.build`: its build joins its
process group and has its priority, its output and its exit status. So a backend stops it and waits for it as
usual.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path

CLIENT = (sys.executable, "-I", "-S", __file__)
MODULE = "backends.torch_backend.compiled.build"


def request_build(address: str, arguments: list[str]) -> int:
    """Let the server build with these arguments. Return the exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        message = json.dumps([arguments, dict(os.environ)]).encode()
        socket.send_fds(server, [len(message).to_bytes(8)], [1, 2])
        server.sendall(message)
        return int.from_bytes(server.recv(1) or b"\1")  # nothing where the process was killed


def serve(address: str) -> None:
    """Answer requests until standard input ends, which is the end of the process that started this one."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        _compile_something()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child is waited for
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    try:
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        _build(client)
                    finally:
                        os._exit(0)


def _build(client: socket.socket) -> None:
    """Be the process that `client` stands for, and send it the exit status."""
    size, outputs, _, _ = socket.recv_fds(client, 8, 2)
    with client.makefile("rb") as file:
        arguments, environment = json.loads(file.read(int.from_bytes(size)))
    pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
    os.setpgid(0, os.getpgid(pid))
    os.sched_setscheduler(0, os.sched_getscheduler(pid), os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))
    if select.select([client], [], [], 0)[0]:
        return  # it was killed before this process had joined its group
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    status = 0
    try:
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    client.sendall(bytes([status]))


def _compile_something() -> None:
    """Import what a build needs, and fill the tables of torch's compiler with a graph that no test has."""
    importlib.import_module(MODULE)
    del sys.modules[MODULE]  # each build runs it
    from backends.torch_backend.compiled.trace import InputSpec, compile_graph, trace

    spec = InputSpec(("rows", 24), "float32")
    source = trace(lambda left, right: ((left @ right.mT).softmax(-1) @ right + 1).tanh(), [spec, spec])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        compile_graph(source, Path(folder) / "graph")


if __name__ == "__main__":
    address, *arguments = sys.argv[1:]
    if arguments:
        sys.exit(request_build(address, arguments))
    serve(address)
