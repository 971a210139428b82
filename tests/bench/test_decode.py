"""The timed steps are those that a scheduler would submit, and every figure is reported."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, TorchBackendConfig
from bench.decode import counted_work, decode_batch, measure, prefill_batches
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from cache.scorer import WindowScorer
from tests.backends.checkpoints import load_oracle, save_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TorchBackendConfig:
    policy = PolicyOptions(slot_capacity=96, num_sink=2, scorer=WindowScorer(observation_window=4))
    path = save_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))
    return TorchBackendConfig(
        str(path), device=DeviceName.CPU, pools=(PoolOptions(2, policy),), prefill_chunk=32, max_model_len=128
    )


def test_prompts_are_read_in_chunks_of_the_scheduler(config: TorchBackendConfig) -> None:
    backend = TorchBackend(config)
    short, longer, long = (prefill_batches(backend, *case) for case in ((8, 2), (45, 1), (100, 1)))
    assert [len(batch.rows) for batch in short] == [2]
    assert [row.scratch for batch in short for row in batch.rows] == [None, None]
    assert [(len(batch.rows[0].token_ids), batch.rows[0].scratch) for batch in longer] == [
        (32, None),
        (13, None),
    ]
    assert [len(batch.rows[0].token_ids) for batch in long] == [32, 32, 32, 4]
    assert [batch.rows[0].is_last for batch in long] == [False, False, False, True]
    (single,) = prefill_batches(backend, 8, 1)
    assert single.shape.num_rows == 1, "no rows of padding"
    for batch in (*short, *longer, *long, single):
        backend.submit(batch).result()


def test_launch_ends_with_the_requested_entries() -> None:
    batch = decode_batch(3, 40, num_steps=4)
    assert [(row.slot, row.index) for row in batch.rows] == [(0, 36), (1, 36), (2, 36)]


def test_every_figure_is_reported(config: TorchBackendConfig) -> None:
    document = measure(config, [(4, 16), (1, 40)], [(8, 2), (100, 1)], rounds=2, num_steps=2)
    launches = [(row["rows"], row["entries"], row["steps_a_launch"]) for row in document["decode"]]
    assert launches == [(4, 16, 1), (4, 16, 2), (1, 40, 1), (1, 40, 2)]
    assert [row["saved_seconds"] == 0 for row in document["decode"]] == [True, False, True, False]
    assert [(row["tokens"], row["prompts"]) for row in document["prefill"]] == [(8, 2), (100, 1)]
    for row in document["decode"] + document["prefill"]:
        assert (
            row["seconds"]
            >= row["best_seconds"]
            > max(row["memory_floor_seconds"], row["matrix_floor_seconds"])
            > 0
        )
    assert document["prefill"][0]["scoring_share"] == 0  # a prompt that fits its slot is not scored
    assert 0 < document["prefill"][1]["scoring_share"] < 1


def test_recurrent_states_are_read_and_written(tmp_path: Path) -> None:
    path = save_checkpoint("falcon-h1", tmp_path)
    config = TorchBackendConfig(str(path), device=DeviceName.CPU, max_model_len=128)
    work = counted_work(TorchBackend(config), config, torch.float32)
    with torch.no_grad():
        cache = load_oracle(path)(torch.ones(1, 5, dtype=torch.long)).past_key_values
    held = sum(
        state.nbytes
        for layer in cache.layers
        for states in (layer.conv_states, layer.recurrent_states)
        for state in states.values()
    )
    assert work.state_bytes == held
    plain = replace(work, state_bytes=0)
    assert work.decode_bytes(3, 7) - plain.decode_bytes(3, 7) == 3 * 2 * held


def test_other_pools_are_timed_beside_the_first(config: TorchBackendConfig) -> None:
    sparse = PoolOptions(1, PolicyOptions(PolicyName.SPARSE, num_recent=12, num_attended=4))
    config = replace(config, pools=(*config.pools, sparse))
    document = measure(config, [(2, 40)], [(8, 1)], rounds=1, num_steps=1)
    assert document["decode"][0]["sparse_share"] > 0
    assert document["pools"][1] == "sparse"


def test_slots_in_8_bits_are_timed_beside_the_others(config: TorchBackendConfig) -> None:
    document = measure(config, [(2, 40)], [(8, 1)], rounds=1, num_steps=1, compares_int8=True)
    [row] = document["decode"]
    assert row["int8_share"] > 0
    exact, rounded = document["slot_bytes"]
    assert 0.25 < rounded / exact < 0.75
