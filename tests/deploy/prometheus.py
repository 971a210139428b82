"""A real Prometheus with the shipped configuration and rules, 30 times as fast.

Only times change: durations in brackets and after `for:`, and the intervals of scraping and evaluation.
Names, labels, thresholds and the structure of every rule are those of `deploy/prometheus/`.
"""

import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.deployment import PROMETHEUS, load_yaml
from tests.e2e.process import free_port

SPEED = 30
INTERVAL = "500ms"
RATE_INTERVAL = "10s"  # the value for $__rate_interval; Grafana's is at least 4 intervals

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\[|for: )(\d+)([smhd])\b")


def sped_up(rules: str) -> str:
    """Return rules whose durations are divided by `SPEED`."""
    return _DURATION.sub(
        lambda match: f"{match[1]}{int(match[2]) * _SECONDS[match[3]] * 1000 // SPEED}ms", rules
    )


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that is ready. An instant query returns the labels and the value of each sample."""

    url: str

    def query(self, text: str) -> list[tuple[dict[str, str], float]]:
        """Raises AssertionError for a query that Prometheus refuses."""
        answer = httpx.post(f"{self.url}/api/v1/query", data={"query": text}, timeout=30).json()
        assert answer["status"] == "success", f"{answer['error']}: {text}"
        data = answer["data"]
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(sample["metric"], float(sample["value"][1])) for sample in data["result"]]

    def firing(self, namespace: str) -> set[str]:
        """Return the names of the alerts that fire in a namespace."""
        answer = httpx.get(f"{self.url}/api/v1/alerts", timeout=30).json()
        return {
            alert["labels"]["alertname"]
            for alert in answer["data"]["alerts"]
            if alert["state"] == "firing" and alert["labels"].get("namespace") == namespace
        }

    def wait_until_firing(self, namespace: str, alerts: set[str], limit: float) -> set[str]:
        """Wait until these alerts fire, and return all that do. Raises AssertionError at `limit` seconds."""
        end = time.monotonic() + limit
        while not alerts <= (now := self.firing(namespace)):
            assert time.monotonic() < end, (
                f"after {limit} s, of {sorted(alerts)} only {sorted(now)} fire in {namespace}"
            )
            time.sleep(0.25)
        return now


@contextmanager
def scraping(targets: Mapping[str, str], folder: Path) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes these targets: an address for each namespace."""
    (folder / "rules.yml").write_text(sped_up((PROMETHEUS / "rules.yml").read_text()))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(_configuration(targets)))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(f"http://{address}", process, folder / "log")
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait(timeout=30)


def _configuration(targets: Mapping[str, str]) -> Any:
    configuration = load_yaml(PROMETHEUS / "prometheus.yml")
    configuration["global"] = {
        "scrape_interval": INTERVAL,
        "evaluation_interval": INTERVAL,
        "scrape_timeout": INTERVAL,
    }
    (job,) = configuration["scrape_configs"]
    job["static_configs"] = [
        {"targets": [address], "labels": {"namespace": namespace}} for namespace, address in targets.items()
    ]
    return configuration


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"Prometheus was not ready within a minute:\n{log.read_text()}")
