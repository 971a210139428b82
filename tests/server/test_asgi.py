"""The application under a runner of another project: it loads, answers, finishes what runs, and ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest


def start(**variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SNAPSERVE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "server.asgi:app", "--port", "0"],
        env=environment | {"SNAPSERVE_MODEL": "demo", "SNAPSERVE_BACKEND": "fake"} | variables,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_runner_loads_serves_and_drains_it() -> None:
    with start(SNAPSERVE_SERVED_MODEL_NAME="here") as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(match[0] for line in lines if (match := re.search(r"http://127.0.0.1:\d+", line)))
        # It is loaded: the runner opens its address after the start.
        assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "here"
        body = {"prompt": "x", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            chunks = response.iter_lines()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in chunks if line]
        assert rest[-1] == "data: [DONE]"
        assert "Application shutdown complete" in process.stderr.read()
        # uvicorn ends by the signal that it has caught.
        assert process.wait(timeout=30) in (0, -signal.SIGTERM)


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_ends_the_runner(tmp_path: Path) -> None:
    with start(SNAPSERVE_BACKEND="torch", SNAPSERVE_MODEL=str(tmp_path)) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3  # uvicorn's status for a failed start
    assert "loading failed" in errors
