"""One Ray cluster with one application after the other, in Ray's own environment.

`test_ray` starts this module, and reads what it prints: what each of them answered.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve

from tests.deploy import ray_health, ray_limits, ray_load
from tests.e2e.process import free_port
from tests.paths import ROOT

NUM_CPUS = 4  # as Ray counts them: replicas of the application before may still be ending
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


def main(folder: Path) -> None:
    found = {}
    with cluster(folder) as url:
        for name, module in (("health", ray_health), ("load", ray_load), ("limits", ray_limits)):
            serve.run(module.application(), name=name)
            found[name] = asyncio.run(module.scenario(url))
            serve.delete(name, _blocking=False)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
