"""Slots whose size follows from the free memory."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends import host_memory
from backends.config import BackendConfig
from backends.host_memory import fitting_prefix_bytes, prefix_bytes
from backends.torch_backend import memory
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
from backends.torch_backend.memory import fitting_length, free_bytes, sized_pools, slot_bytes, with_sizes
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.spec import layer_kinds, scratch_layout
from cache.policy import PolicyName
from cache.policy_options import DEFAULT_CAPACITY, PolicyOptions
from cache.pool_options import KVCacheDtype, PoolOptions
from cache.slots import PlaneSpec, StateSpec
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import Driver, Request
from tests.backends.oracle import random_prompt

CPU = torch.device("cpu")
PLANES = (PlaneSpec("key", 8, torch.float32), PlaneSpec("value", 8, torch.float32))
ENTRY = 2 * 2 * 8 * 4  # bytes of a layer
FULL = LayerSpec(4, 2, PLANES, None)
SLIDING = LayerSpec(4, 2, PLANES, 512)
MAX_MODEL_LEN = 8192
SCRATCH = 2 * (MAX_MODEL_LEN + 1) * ENTRY  # two of them, of a layer


def sized(free: int, *pools: PoolOptions, layers: tuple[LayerSpec, ...] = (FULL,)) -> list[PolicyOptions]:
    config = TorchBackendConfig("model", pools=pools or (PoolOptions(4),))
    return [pool.policy for pool in sized_pools(config, layers, MAX_MODEL_LEN, free, CPU)]


def test_a_slot_for_the_longest_sequence_loses_nothing() -> None:
    [policy] = sized(SCRATCH + 4 * (MAX_MODEL_LEN + 1) * ENTRY)
    resolved = policy.resolve(MAX_MODEL_LEN)
    assert resolved.layout.capacity == resolved.num_exact_tokens(MAX_MODEL_LEN) == MAX_MODEL_LEN
    assert not policy.measures_layers
    assert resolved.max_direct_tokens >= MAX_MODEL_LEN, "a prompt needs no scratch"


def test_slots_are_as_long_as_fit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        [policy] = sized(SCRATCH + 4 * 5000 * ENTRY)
    capacity = policy.resolve(MAX_MODEL_LEN).layout.capacity
    assert f"slots of pool snapstream have {capacity} entries: 4 of them fit" in caplog.text
    longer = replace(policy, slot_capacity=capacity + 64)
    assert slot_bytes(PoolOptions(4, policy), (FULL,), MAX_MODEL_LEN) <= 4 * 5000 * ENTRY
    assert slot_bytes(PoolOptions(4, longer), (FULL,), MAX_MODEL_LEN) > 4 * 5000 * ENTRY


def fitted(free: int, limit: int, policy: PolicyName, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the longest sequence by default, of four slots."""
    monkeypatch.setattr(memory, "free_bytes", lambda _device: free)
    pools = (PoolOptions(4, PolicyOptions(policy)),)
    config = TorchBackendConfig("model", pools=pools, fills_memory=True)
    return fitting_length(config, (FULL,), limit, CPU)


@pytest.mark.parametrize(
    ("limit", "num_tokens", "policy", "length"),
    [
        (8192, 0, PolicyName.SNAPSTREAM, 8192),
        (131072, 0, PolicyName.SNAPSTREAM, 16384),  # what was always served
        (131072, 6 * 16400, PolicyName.SNAPSTREAM, 16384),  # slots of 16384 come first
        (131072, 4 * 16400 + 2 * 70_000, PolicyName.SNAPSTREAM, 16384),  # what is longer has half as much
        (131072, 2 * (4 * 16400 + 2 * 70_000), PolicyName.SNAPSTREAM, 65536),
        (100_000, 2 * (4 * 16400 + 2 * 100_100), PolicyName.SNAPSTREAM, 100_000),
        (131072, 2 * 6 * 32_800, PolicyName.FULL, 32768),
    ],
)
def test_sequences_are_as_long_as_fit(
    limit: int, num_tokens: int, policy: PolicyName, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two scratches hold the longest sequence each, and with policy full each slot does."""
    assert fitted(num_tokens * ENTRY, limit, policy, monkeypatch) == length


@pytest.mark.parametrize("fills_memory", [False, True])
def test_a_backend_serves_the_models_own_limit(
    tmp_path: Path, fills_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "DEFAULT_MAX_MODEL_LEN", 80)
    folder = save_checkpoint("llama", tmp_path)
    config = TorchBackendConfig(
        str(folder),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        fills_memory=fills_memory,
        compile=False,
    )
    backend = TorchBackend(config)
    limit = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    assert backend.spec.max_model_len == (limit if fills_memory else 80)
    assert limit > 80


@pytest.mark.parametrize(("configured", "share"), [(None, 4), (131_072, 2)])
def test_slots_beyond_the_usual_length_take_a_quarter_of_the_memory_unless_configured(
    configured: int | None, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = 4 * (2 * 131_073 + 4 * 60_000) * ENTRY
    monkeypatch.setattr(memory, "available_bytes", lambda *_: available)
    config = TorchBackendConfig("model", (PoolOptions(4),), max_model_len=configured, fills_memory=True)
    [pool] = with_sizes(config, (FULL,), 131_072, CPU).pools
    taken = slot_bytes(pool, (FULL,), 131_072) + 2 * 131_073 * ENTRY
    assert 0.7 * available / share < taken <= available / share


@pytest.mark.parametrize("max_model_len", [None, 131_072])
def test_long_slots_are_of_a_few_sizes_unless_a_length_is_configured(max_model_len: int | None) -> None:
    config = TorchBackendConfig("model", pools=(PoolOptions(4),), max_model_len=max_model_len)
    scratch = 2 * 131_073 * ENTRY
    capacities = []
    for num_entries in (20_000, 30_000, 36_000, 45_000, 55_000, 90_000):
        [pool] = sized_pools(config, (FULL,), 131_072, scratch + 4 * num_entries * ENTRY, CPU)
        capacities.append(pool.policy.resolve(131_072).layout.capacity)
    if max_model_len is None:
        assert capacities == [16_384, 24_576, 32_768, 32_768, 49_152, 65_536]
    else:
        assert capacities[0] > 17_500
        assert capacities[-1] > 80_000


def test_slots_are_smaller_than_a_scratch_that_evicts() -> None:
    config = TorchBackendConfig("model", pools=(PoolOptions(4),), scratch_capacity=4096)
    [pool] = sized_pools(config, (FULL,), MAX_MODEL_LEN, 10**12, CPU)
    policy = pool.policy.resolve(MAX_MODEL_LEN)
    assert 4000 < policy.layout.capacity < 4096
    kinds = layer_kinds(policy, (FULL,), MAX_MODEL_LEN)
    assert scratch_layout(4096, MAX_MODEL_LEN, 512, kinds).max_tokens == 4096


@pytest.mark.parametrize("scratch_capacity", [300, 1000, 2000])
def test_slots_fit_a_small_scratch(scratch_capacity: int) -> None:
    config = TorchBackendConfig("model", pools=(PoolOptions(4),), scratch_capacity=scratch_capacity)
    [pool] = sized_pools(config, (FULL,), MAX_MODEL_LEN, 10**12, CPU)
    policy = pool.policy.resolve(MAX_MODEL_LEN)
    kinds = layer_kinds(policy, (FULL,), MAX_MODEL_LEN)
    assert scratch_layout(scratch_capacity, MAX_MODEL_LEN, 512, kinds).max_tokens == scratch_capacity
    assert policy.layout.capacity > scratch_capacity // 2


@pytest.mark.parametrize("free", [0, SCRATCH, SCRATCH + 4 * 1000 * ENTRY])
def test_slots_are_never_shorter_than_the_usual_default(free: int) -> None:
    [policy] = sized(free)
    assert policy.resolve(MAX_MODEL_LEN).layout.capacity == DEFAULT_CAPACITY


def test_layers_with_a_sliding_window_leave_the_memory_to_the_others() -> None:
    free = 2 * SCRATCH + 4 * 9000 * ENTRY
    [policy] = sized(free, layers=(FULL, SLIDING))
    [both_full] = sized(free, layers=(FULL, FULL))
    assert policy.resolve(MAX_MODEL_LEN).layout.capacity == MAX_MODEL_LEN
    assert both_full.resolve(MAX_MODEL_LEN).layout.capacity < 4500


def test_pools_without_a_size_share_what_the_others_leave() -> None:
    given = PoolOptions(2, PolicyOptions(PolicyName.FULL, slot_capacity=3000), "given")
    pools = (given, PoolOptions(2, name="a"), PoolOptions(4, name="b"))
    policies = sized(SCRATCH + (2 * 3001 + 2 * 2 * 6200) * ENTRY, *pools)
    capacities = [policy.resolve(MAX_MODEL_LEN).layout.capacity for policy in policies]
    assert capacities[0] == 3000
    assert 5800 < capacities[1] < 6200
    assert 2800 < capacities[2] < 3100


def test_slots_in_8_bits_are_longer() -> None:
    """A token takes 20 bytes of a head instead of 64: keys and values of 8 float32."""
    free = SCRATCH + 4 * 2200 * ENTRY
    exact, *both_rounded = (
        sized(free, PoolOptions(4, kv_cache_dtype=kv_cache_dtype))[0].resolve(MAX_MODEL_LEN).layout.capacity
        for kv_cache_dtype in KVCacheDtype
    )
    assert len(set(both_rounded)) == 1
    assert 2.5 * exact < both_rounded[0] < 3.2 * exact


@pytest.mark.parametrize(
    "policy",
    [
        PolicyOptions(slot_capacity=100),
        PolicyOptions(num_sink=2),
        PolicyOptions(PolicyName.SNAPKV),
        PolicyOptions(PolicyName.STREAMING_LLM),
        PolicyOptions(PolicyName.FULL),
    ],
)
def test_other_policies_and_given_sizes_stay(policy: PolicyOptions) -> None:
    assert sized(10**12, PoolOptions(4, policy)) == [policy]


@pytest.mark.parametrize("architecture", ["gemma2", "lfm2"])
@pytest.mark.parametrize("kv_cache_dtype", [KVCacheDtype.AUTO, KVCacheDtype.INT8])
def test_the_computed_bytes_are_the_allocated_ones(
    tmp_path: Path, kv_cache_dtype: KVCacheDtype, architecture: str
) -> None:
    config = TorchBackendConfig(
        str(save_checkpoint(architecture, tmp_path)),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        pools=(PoolOptions(3, kv_cache_dtype=kv_cache_dtype),),
        max_model_len=128,
        fills_memory=True,
        compile=False,
    )
    backend = TorchBackend(config)
    [pool] = backend.pools
    allocated = sum(layer.slots.num_bytes for layer in pool.cache.layers)
    assert pool.spec.policy.layout.capacity == 128
    assert pool.spec.slot_bytes * 3 == allocated
    options = PoolOptions(3, PolicyOptions(slot_capacity=128, num_kept=0), kv_cache_dtype=kv_cache_dtype)
    layers = [
        LayerSpec(
            0,
            layer.num_kv_heads,
            tuple(PlaneSpec("", plane.shape[-1], plane.dtype) for plane in layer.scratch.planes),
            layer.kind.sliding_window,
            states=tuple(StateSpec(tuple(state.shape[1:]), state.dtype) for state in layer.slots.states),
        )
        for layer in pool.cache.layers
    ]
    assert slot_bytes(options, layers, 128) == allocated


def test_answers_are_those_of_policy_full(tmp_path: Path) -> None:
    config = TorchBackendConfig(
        str(save_checkpoint("llama", tmp_path)),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        max_model_len=128,
        fills_memory=True,
        compile=False,
    )
    answers = []
    for policy in (PolicyOptions(), PolicyOptions(PolicyName.FULL)):
        request = Request(random_prompt(90))
        Driver(TorchBackend(replace(config, pools=(PoolOptions(2, policy),))), 32).run(request, num_tokens=38)
        answers.append(request.tokens)
    assert answers[0] == answers[1]


def test_a_cpus_free_memory_is_half_of_what_the_control_group_leaves(tmp_path: Path) -> None:
    assert free_bytes(CPU, tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert free_bytes(CPU, tmp_path) == 2000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert free_bytes(CPU, tmp_path) == 2000 * 1024
    (group / "memory.max").write_text(f"{3000 * 1024}\n")
    (group / "memory.current").write_text(f"{1000 * 1024}\n")
    (group / "memory.stat").write_text(f"anon {600 * 1024}\ninactive_file {400 * 1024}\n")
    assert free_bytes(CPU, tmp_path) == 1200 * 1024, "pages of files are reclaimed"


def test_stored_prompts_take_a_tenth_of_the_memory_and_at_most_4_gib() -> None:
    assert prefix_bytes(None, 5000) == 500
    assert prefix_bytes(None, 10**12) == 4 << 30
    assert prefix_bytes(None, None) == 0
    assert prefix_bytes(700, 5000) == 700


def test_stored_prompts_fit_beside_slots_and_scratches() -> None:
    assert fitting_prefix_bytes(4000, None, 0) == 4000
    assert fitting_prefix_bytes(4000, 5000, 1000) == 4000
    assert fitting_prefix_bytes(None, 5000, 4800) == 200, "the default takes what is left"
    assert fitting_prefix_bytes(None, 5000, 6000) == 0
    message = "prefix_cache_bytes must be at most 4000: 5000 bytes are available, and slots and"
    with pytest.raises(ValueError, match=message):
        fitting_prefix_bytes(4001, 5000, 1000)


def test_a_gpu_has_a_stores_values_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    options = PoolOptions(4, PolicyOptions(PolicyName.SPARSE))
    config = TorchBackendConfig("model", pools=(options, PoolOptions(4)), fills_memory=True)
    whole = slot_bytes(options, (FULL,), MAX_MODEL_LEN)
    num_blocks = (MAX_MODEL_LEN - 128) // 16 + 1
    values = 4 * 2 * num_blocks * 16 * 4  # slots, heads, entries, bytes of 8 numbers in 4 bits
    free = SCRATCH + whole + 4 * 3000 * ENTRY

    def capacity(device: torch.device, free: int) -> int:
        [_, pool] = sized_pools(config, (FULL,), MAX_MODEL_LEN, free, device)
        return pool.policy.resolve(MAX_MODEL_LEN).layout.capacity

    assert capacity(gpu, free - values) == capacity(CPU, free) > 2048
    monkeypatch.setattr(memory, "available_bytes", lambda *_: 10**9)
    pinned = 1 << (values - 1).bit_length()
    assert pinned > values
    given = replace(config, pools=(options,), fills_memory=False, prefix_cache_bytes=10**9 - pinned)
    assert with_sizes(given, (FULL,), MAX_MODEL_LEN, gpu).prefix_cache_bytes == 10**9 - pinned
    with pytest.raises(ValueError, match=f"slots and scratches take {pinned} of them"):
        with_sizes(replace(given, prefix_cache_bytes=10**9), (FULL,), MAX_MODEL_LEN, gpu)
    monkeypatch.setattr(memory, "available_bytes", lambda *_: pinned - 1)
    with pytest.raises(ValueError, match=f"^slots of policy sparse need {pinned} bytes of the host's memory"):
        with_sizes(replace(given, prefix_cache_bytes=0), (FULL,), MAX_MODEL_LEN, gpu)


def test_slots_and_stored_prompts_do_not_overcommit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that fill the memory leave the store's bytes, and slots of a given size may not."""
    available = 2 * (SCRATCH + 4 * 5000 * ENTRY)
    for module in (memory, host_memory):
        monkeypatch.setattr(module, "available_bytes", lambda *_: available)
    config = TorchBackendConfig("model", pools=(PoolOptions(4),), fills_memory=True, prefix_cache_bytes=None)
    sized = with_sizes(config, (FULL,), MAX_MODEL_LEN, CPU)
    assert sized.prefix_cache_bytes == available // 10
    taken = SCRATCH + slot_bytes(sized.pools[0], (FULL,), MAX_MODEL_LEN)
    assert taken + available // 10 <= available // 2
    given = replace(config, fills_memory=False, pools=(PoolOptions(4, PolicyOptions(PolicyName.FULL)),))
    room = available - SCRATCH - slot_bytes(given.pools[0], (FULL,), MAX_MODEL_LEN)
    assert with_sizes(replace(given, prefix_cache_bytes=room), (FULL,), MAX_MODEL_LEN, CPU)
    with pytest.raises(ValueError, match=f"prefix_cache_bytes must be at most {room}: "):
        with_sizes(replace(given, prefix_cache_bytes=room + 1), (FULL,), MAX_MODEL_LEN, CPU)


def test_a_draft_reads_as_long_prompts_as_fit() -> None:
    assert BackendConfig("model", fills_memory=True).of_draft("draft").max_model_len is None
    assert BackendConfig("model", max_model_len=80).of_draft("draft").max_model_len == 16384
    assert BackendConfig("model", fills_memory=True).of_draft("draft").fills_memory


def test_other_backends_keep_the_usual_default() -> None:
    assert not BackendConfig("model").fills_memory
