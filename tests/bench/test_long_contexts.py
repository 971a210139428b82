"""Full and small slots take the same memory and are full, and every figure is reported and drawn."""

import json
from pathlib import Path

import pytest

from backends.torch_backend.config import DeviceName, TorchBackendConfig
from bench.decode import decode_batch
from bench.long_contexts import main, same_memory
from cache.pool_options import PoolOptions
from tests.backends.checkpoints import save_checkpoint


@pytest.mark.parametrize("name", ["full", "snapstream"])
def test_contexts_fill_their_slots(name: str) -> None:
    slots = same_memory(512, 2, 4)[name]
    (pool,) = TorchBackendConfig(
        "any", device=DeviceName.CPU, pools=(PoolOptions(slots.num_slots, slots.policy),)
    ).pools
    policy = pool.policy.resolve(512)
    row = decode_batch(slots.num_slots, 512, num_prompt_tokens=511).rows[0]
    num_live = policy.place(row.num_prompt_tokens).num_live(row.index + 1)
    assert num_live == policy.layout.capacity == slots.entries
    assert slots.num_slots * slots.entries == 2 * 512


def test_every_figure_is_reported_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_checkpoint("llama", tmp_path / "checkpoint"))
    options = ["--context", "512", "--full-slots", "2", "--rounds", "2", "--no-compile"]
    files = ("--json", str(tmp_path / "long.json"), "--plot", str(tmp_path / "long.svg"))
    assert main([model, *options, *files]) == 0
    document = json.loads((tmp_path / "long.json").read_text())
    full, more, same = (document[name] for name in ("full", "snapstream", "snapstream, same number"))
    assert [(row["sequences"], row["entries"]) for row in (full, more, same)] == [
        (2, 512),
        (8, 128),
        (2, 128),
    ]
    assert more["cache_bytes"] == pytest.approx(full["cache_bytes"], rel=0.1)  # spare entries, kept indices
    assert same["cache_bytes"] == more["cache_bytes"] // 4
    assert all(row["seconds"] > row["attention_seconds"] for row in (full, more, same))
    assert document["ratio"] > 0
    assert "4 × smaller slots" in capsys.readouterr().out
    assert (tmp_path / "long.svg").read_text().startswith("<?xml")
