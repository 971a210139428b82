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
TIME_LIMIT = 600.0  # seconds, for a machine that is busy with other things


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
                "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
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
def test_only_a_stream_that_is_not_whole_ends_with_an_error() -> None:
    assert result_of("ray_endings") == {
        "amid": [2, 1, True],
        "at the end": [2, 0, True],
        "after the last text": [1, 0, True],
    }


@pytest.mark.long
@pytest.mark.ray
def test_applications_on_a_cluster() -> None:
    """Together, since a cluster takes long to start."""
    found = result_of("ray_cluster")
    assert found["limits"] == {
        "largest": [200, "10240", ""],
        "too large": [413, "request_too_large", ""],
        "upload beside an upload": [503, "server_overloaded", "1"],
        "prompt beside an upload": [200, "1024", ""],
        "slow": [408, "request_timeout", ""],
        "upload after it": [200, "6144", ""],
        "upload after a client that left": [200, "6144", ""],
    }
    check_stalled_replica_is_replaced(found["health"])
    check_replicas_under_load(found["load"])


def check_stalled_replica_is_replaced(found: dict[str, Any]) -> None:
    assert found["before"] == found["after"] == [200, None]
    assert found["stalled"] == [503, "replica_lost"]


def check_replicas_under_load(found: dict[str, Any]) -> None:
    assert found["flood"] == {"200 done": 64}
    assert found["hit_rate"] >= 0.9
    # The streams of the dead replica end with one error, the others to their end, and nothing else is lost.
    endings = Counter((each["status"], each["is_done"], *each["errors"]) for each in found["killed"])
    num_lost = endings[200, False, "replica_lost"]
    assert num_lost + endings[200, True] == 12, dict(endings)
    assert 1 <= num_lost < 12
    assert found["after"] == {"200 done": 8}
    assert found["last"].keys() == {"200 done"}
    assert found["last"]["200 done"] >= 4
    assert found["health"] == 200
