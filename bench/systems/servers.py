"""Our server and those of other projects: how each is started, and how long it takes until it is ready."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.systems.system import ROOT, MeasurementError

START_LIMIT = 300.0  # seconds
# Models of random weights repeat themselves. Lookup would guess that, which says nothing of real answers.
OWN_OPTIONS = (
    *("--num-slots", "8", "--slot-capacity", "2048", "--max-model-len", "16384"),
    *("--num-speculative-tokens", "0"),
)


@dataclass(frozen=True, slots=True)
class Server:
    """A command that serves a model, with `{port}` for the port. `extra_body` is merged into requests."""

    name: str
    command: Sequence[str]
    health: str
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    extra_body: Mapping[str, Any] | None = None
    takes_token_ids: bool = True


def snapserve(model: Path, *options: str) -> Server:
    """Return our server, with these options of `snapserve serve` after `OWN_OPTIONS`."""
    command = (
        sys.executable,
        "-m",
        "server",
        "serve",
        "--model",
        str(model),
        "--port",
        "{port}",
        "--log-level",
        "warning",
    )
    return Server("snapserve", (*command, *OWN_OPTIONS, *options), "/ready")


def vllm(executable: str, model: Path) -> Server:
    command = (
        executable,
        "serve",
        str(model),
        "--port",
        "{port}",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "16384",
    )
    return Server("vLLM", command, "/health", {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "4"})


def llama_cpp(executable: str, gguf: Path) -> Server:
    """Return llama.cpp's server for eight sequences of up to 8448 tokens, with its default KV, float16.

    KV in bfloat16 takes as many bytes, and reads prompts at half the speed.
    """
    sizes = ("-t", str(os.cpu_count()), "-np", "8", "-c", str(8 * 8448), "-fa", "on")
    return Server("llama.cpp", (executable, "-m", str(gguf), "--port", "{port}", *sizes), "/health")


def transformers(executable: str, model: Path) -> Server:
    """Return the server of transformers, which takes text and has no `ignore_eos`."""
    sizes = ("--cb-block-size", "64", "--cb-num-blocks", "1024", "--cb-max-batch-tokens", "512")
    command = (
        executable,
        "serve",
        str(model),
        "--port",
        "{port}",
        "--continuous-batching",
        "--dtype",
        "bfloat16",
        "--device",
        "cpu",
        *sizes,
    )
    extra = {
        "ignore_eos": None,
        "temperature": None,
        "generation_config": '{"do_sample": false, "eos_token_id": -1}',
    }
    return Server(
        "transformers serve", command, "/health", model=str(model), extra_body=extra, takes_token_ids=False
    )


@contextmanager
def serving(server: Server, log: Path) -> Iterator[tuple[str, float]]:
    """Start a server, yield its URL and the seconds until it was ready, and stop it.

    Raises `MeasurementError`.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [part.replace("{port}", str(port)) for part in server.command]
    start = time.monotonic()
    with log.open("wb") as output:
        environment = {**os.environ, **server.environment}
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(server, url + server.health, process, log)
            yield url, time.monotonic() - start
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # else vLLM's engine would outlive its server
            process.wait()


def _wait_until_ready(server: Server, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_LIMIT
    with httpx.Client(trust_env=False, timeout=5) as client:
        while time.monotonic() < end:
            if process.poll() is not None:
                output = log.read_text(errors="replace")[-500:]
                raise MeasurementError(f"{server.name} exited with {process.returncode}: {output}")
            try:
                if client.get(url).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
    raise MeasurementError(f"{server.name} was not ready after {START_LIMIT:.0f} s; its output is in {log}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
