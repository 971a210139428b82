"""Without uvicorn's private interfaces, the server starts, warns and serves."""

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from tests.paths import ROOT

MISSING_MODULE = """
import builtins
real_import = builtins.__import__
def without_internals(name, globals=None, *args, **kwargs):
    if name.startswith("uvicorn.") and (globals or {}).get("__name__", "").startswith("server."):
        raise ImportError(f"No module named {name!r}")
    return real_import(name, globals, *args, **kwargs)
builtins.__import__ = without_internals
"""
MISSING_NAME = """
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
del HttpToolsProtocol.send_400_response
"""
CHOOSE = """
from server.http.connection import protocol_with
from server.options.settings import ConnectionLimits
print(protocol_with(ConnectionLimits(), None))
"""
SERVE = """
import sys
from commands.cli import main
sys.exit(main(['serve', '--backend', 'fake', '--port', '0']))
"""


def test_only_the_bounded_protocol_imports_modules_of_uvicorn() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for package in ("bench", "commands", "server")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^ *(from|import) uvicorn\.", path.read_text(), re.MULTILINE)
    }
    assert users == {"server/http/bounded_protocol.py"}


@pytest.mark.parametrize("missing", [MISSING_MODULE, MISSING_NAME])
def test_the_fence_falls_back_to_uvicorns_own_protocol(missing: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", missing + CHOOSE], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "auto\n"


def test_a_server_without_uvicorns_internals_warns_and_serves() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MISSING_MODULE + SERVE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = next(word for word in line.split() if word.startswith("http://"))
        body = {"model": "snapserve-demo", "prompt": "x", "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0
    assert process.returncode == 0
    [warning] = [line for line in log.splitlines() if "connection limits" in line]
    for flag in ("--max-connections", "--read-timeout", "--write-timeout", "--idle-timeout"):
        assert flag in warning
