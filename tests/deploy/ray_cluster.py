"""One Ray cluster with three applications beside each other, in Ray's own environment.

`test_ray` starts this module, and reads what it prints: what each of them answered.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve

from tests.deploy import ray_health, ray_limits, ray_load
from tests.e2e.process import free_port
from tests.paths import ROOT

NUM_CPUS = 8  # as Ray counts them: replicas may still be ending when others start
START_LIMIT = 300.0  # seconds, for a machine that is busy with other things
# Each application and the paths that it answers. `ray_limits` is last, since it changes the ingress.
APPLICATIONS = {
    "health": ("/v1/chat/completions", ray_health),
    "load": ("/", ray_load),
    "limits": ("/v1/files", ray_limits),
}
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'deploy' / 'ray'}",
    "OMP_NUM_THREADS": "1",
    "SNAPSERVE_MODEL": "demo",
    "SNAPSERVE_COMPILE": "no",
    "SNAPSERVE_LOG_LEVEL": "warning",
}


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Start Ray with its HTTP proxy, and yield the URL."""
    ray.init(
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        object_store_memory=100 * 1024 * 1024,
        _temp_dir=str(folder),
        runtime_env={"env_vars": ENVIRONMENT},
        log_to_driver=False,
    )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    ray.shutdown()


def start_applications() -> None:
    """Start them together, and wait until all of them run."""
    for name, (path, module) in APPLICATIONS.items():
        serve.run_many(
            [serve.RunTarget(module.application(), name, path)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    end = time.monotonic() + START_LIMIT
    while {each.status for each in serve.status().applications.values()} != {"RUNNING"}:
        assert time.monotonic() < end, serve.status()
        time.sleep(0.5)


async def scenarios(url: str) -> dict[str, Any]:
    """Return what each application answered. They wait for much, so they run together."""
    found = await asyncio.gather(*(module.scenario(url) for _, module in APPLICATIONS.values()))
    return dict(zip(APPLICATIONS, found, strict=True))


def main(folder: Path) -> None:
    with cluster(folder) as url:
        start_applications()
        found = asyncio.run(scenarios(url))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
