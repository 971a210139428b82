"""Backends by name, and a backend that another package registers."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from backends.clock import VirtualClock
from backends.config import BackendConfig
from backends.options import OptionGroup
from backends.registry import BUILT_IN, configure_backend
from backends.torch_backend.config import DeviceName, TorchOptions
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from tests.backends.checkpoints import save_checkpoint
from tests.paths import ROOT


def test_backends_have_the_configured_sizes(tmp_path: Path) -> None:
    pools = (PoolOptions(3), PoolOptions(1, PolicyOptions(PolicyName.FULL, 64)))
    model = str(save_checkpoint("llama", tmp_path))
    base = BackendConfig(model, pools, max_model_len=128, num_scratch=1)
    options: dict[str, OptionGroup] = {name: entry.options() for name, entry in BUILT_IN.items()}
    options["torch"] = TorchOptions(device=DeviceName.CPU, compile=False)
    specs = [
        configure_backend(name, base, options).load(VirtualClock(), vocab_size=512).spec
        for name in ("torch", "fake")
    ]
    for spec in specs:
        assert [pool.num_slots for pool in spec.pools] == [3, 1]
        assert (spec.max_model_len, spec.scratch.num_scratch) == (128, 1)
    # The fake backend holds no slots and checks no drafts.
    like_fake = [replace(pool, slot_bytes=0, max_draft_tokens=0) for pool in specs[0].pools]
    assert like_fake == list(specs[1].pools)


def test_the_fake_backend_needs_no_torch() -> None:
    program = """
import sys
from backends.clock import VirtualClock
from backends.config import BackendConfig
from backends.registry import BUILT_IN, configure_backend
options = {name: entry.options() for name, entry in BUILT_IN.items()}
configure_backend("fake", BackendConfig("model"), options).load(VirtualClock(), 512)
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


PLUGIN = """
from typing import ClassVar

from backends.config import ConfiguredBackend
from backends.entry import BackendEntry
from backends.fake import FakeBackend, fake_spec, slot_pool
from backends.options import Count, OptionGroup


class PluginOptions(OptionGroup):
    title: ClassVar[str] = "Plugin"

    plugin_slots: Count = 2
    \"\"\"Slots of the plugin.\"\"\"


def configure(base, options, other):
    def create(config, clock, vocab_size):
        pool = config.pools[0]
        slots = slot_pool(options.plugin_slots, pool.policy.resolve(256), 256, pool.label)
        return FakeBackend(fake_spec(max_model_len=256, pools=[slots], vocab_size=vocab_size), clock=clock)

    return ConfiguredBackend(base, create)


ENTRY = BackendEntry(PluginOptions, configure)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """A package outside of the project with a backend; the environment in which it is installed."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    installed = tmp_path / "plugin-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[snapserve.backends]\nmine = plugin:ENTRY\n")
    return os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONUNBUFFERED": "1"}


def test_a_backend_registered_by_another_package_is_served(plugin: dict[str, str]) -> None:
    command = [sys.executable, "-m", "server", "serve", "--backend", "mine", "--port", "0"]
    with subprocess.Popen(
        [*command, "--plugin-slots", "3"], stdout=subprocess.PIPE, text=True, env=plugin
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "3 slots" in line
        url = next(word for word in line.split() if word.startswith("http://")).rstrip(":")
        body = {"model": "snapserve-demo", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()
        process.terminate()
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--backend", "mine", "--plugin-slots", "0"), "--plugin-slots must be a whole number of at least 1"),
        (("--backend", "yours"), "--backend must be one of torch, fake, sn40l, mine, got 'yours'"),
    ],
)
def test_options_of_a_registered_backend_are_checked(
    plugin: dict[str, str], flags: tuple[str, ...], message: str
) -> None:
    command = [sys.executable, "-m", "server", "serve", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, env=plugin, check=False)
    assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("mine = nowhere:ENTRY", "backend 'mine' of nowhere:ENTRY cannot be imported"),
        ("mine = plugin:PluginOptions", "must be a BackendEntry"),
        ("torch = plugin:ENTRY", "there is a backend of this name already"),
    ],
)
def test_a_registration_that_cannot_be_used_is_reported(
    plugin: dict[str, str], tmp_path: Path, entry: str, message: str
) -> None:
    (tmp_path / "plugin-1.0.dist-info" / "entry_points.txt").write_text(f"[snapserve.backends]\n{entry}\n")
    command = [sys.executable, "-m", "server", "serve"]
    ended = subprocess.run(command, capture_output=True, text=True, env=plugin, check=False)
    assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr
    assert "Traceback" not in ended.stderr
