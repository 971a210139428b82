"""Ray Serve: `deploy/ray` under load in a process of its own, with the environment of `scripts/setup-ray`."""

import json
import os
import subprocess
import tempfile
from collections import Counter
from typing import Any

import pytest

from tests.paths import ROOT

PYTHON = ROOT / ".venv-ray" / "bin" / "python"
TIME_LIMIT = 400.0  # seconds, for a machine that is busy with other things


def result_of(module: str) -> Any:
    """Return what a module of this folder prints in Ray's environment."""
    if not PYTHON.exists():
        pytest.skip("needs Ray's environment (`scripts/setup-ray`)")
    # Not pytest's folder: the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        done = subprocess.run(
            [PYTHON, "-m", f"tests.deploy.{module}", folder],
            cwd=ROOT,
            env=os.environ
            | {
                "PYTHONPATH": f"{ROOT}:{ROOT / 'deploy' / 'ray'}",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "disabled",
                "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # of a machine that is busy with other things
            },
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-12000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.ray
def test_limits_of_bodies() -> None:
    assert result_of("ray_limits") == {
        "largest": [200, "10240", ""],
        "too large": [413, "request_too_large", ""],
        "upload beside an upload": [503, "server_overloaded", "1"],
        "prompt beside an upload": [200, "1024", ""],
        "slow": [408, "request_timeout", ""],
        "upload after it": [200, "6144", ""],
        "upload after a client that left": [200, "6144", ""],
    }


@pytest.mark.long
@pytest.mark.ray
def test_only_a_stream_that_is_not_whole_ends_with_an_error() -> None:
    assert result_of("ray_endings") == {
        "amid": [2, 1, True],
        "at the end": [2, 0, True],
        "after the last text": [1, 0, True],
    }


@pytest.mark.long
@pytest.mark.ray
def test_a_replica_whose_engine_stalls_is_replaced() -> None:
    found = result_of("ray_health")
    assert found["before"] == found["after"] == [200, None]
    status, code = found["stalled"]
    assert (status, code) == (503, "replica_lost")


@pytest.mark.long
@pytest.mark.ray
def test_replicas_on_ray_serve() -> None:
    found = result_of("ray_scenario")
    assert found["flood"] == {"200 done": 64}
    assert found["hit_rate"] >= 0.9
    # The streams of the dead replica end with one error, the others to their end, and nothing else is lost.
    endings = Counter((each["status"], each["is_done"], *each["errors"]) for each in found["killed"])
    num_lost = endings[200, False, "replica_lost"]
    assert num_lost + endings[200, True] == 16, dict(endings)
    assert 1 <= num_lost < 16
    assert found["after"] == {"200 done": 10}
    assert found["health"] == 200
