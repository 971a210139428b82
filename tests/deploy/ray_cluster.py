"""Ray on this machine, for the scenarios that `test_ray` starts in Ray's own environment."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve

from tests.e2e.process import free_port
from tests.paths import ROOT

DEMO = {
    "OMP_NUM_THREADS": "1",
    "SNAPSERVE_MODEL": "demo",
    "SNAPSERVE_COMPILE": "no",
    "SNAPSERVE_LOG_LEVEL": "warning",
}


@contextmanager
def cluster(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Start Ray with its HTTP proxy, and yield the URL. Replicas have the variables of `environment`."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 1024 * 1024,
        _temp_dir=str(folder),
        runtime_env={
            "env_vars": {"PYTHONPATH": f"{ROOT}:{ROOT / 'deploy' / 'ray'}", **environment},
        },
        log_to_driver=False,
    )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
