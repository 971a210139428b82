"""Backends by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from backends.clock import VirtualClock
from backends.registry import create_backend
from backends.torch_backend.config import DeviceName, TorchBackendConfig
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from tests.backends.checkpoints import save_checkpoint


def test_both_backends_have_the_sizes_asked_for(tmp_path: Path) -> None:
    pools = (PoolOptions(3), PoolOptions(1, PolicyOptions(PolicyName.FULL, 64)))
    config = TorchBackendConfig(
        str(save_checkpoint("llama", tmp_path)),
        device=DeviceName.CPU,
        pools=pools,
        max_model_len=128,
        num_scratch=1,
    )
    specs = [create_backend(name, config, VirtualClock()).spec for name in ("torch", "fake")]
    for spec in specs:
        assert [pool.num_slots for pool in spec.pools] == [3, 1]
        assert (spec.max_model_len, spec.scratch.num_scratch) == (128, 1)
    assert specs[0].pools == specs[1].pools


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="abacus; choose from torch, fake"):
        create_backend("abacus", TorchBackendConfig("model"), VirtualClock())


def test_the_fake_backend_needs_no_torch() -> None:
    program = """
import sys
from backends.clock import VirtualClock
from backends.registry import create_backend
from backends.torch_backend.config import TorchBackendConfig
create_backend("fake", TorchBackendConfig("model"), VirtualClock())
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
