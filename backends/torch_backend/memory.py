"""What slots, scratches and stored prompts take of the memory.

Without a configured size, sequences and slots are as long as fit, and stored prompts take a share.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from backends.config import DEFAULT_MAX_MODEL_LEN
from backends.host_memory import available_bytes, fitting_prefix_bytes, prefix_bytes
from backends.torch_backend.config import TorchBackendConfig
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.pool import allocate_scratches
from backends.torch_backend.spec import layer_kinds
from cache.policy import HELD_WINDOW
from cache.policy_options import DEFAULT_CAPACITY
from cache.pool_options import PoolOptions
from cache.scratch import ScratchLayout
from cache.slots import SlotCache

logger = logging.getLogger(__name__)

# The rest is for activations, the allocator, and on a CPU for the other processes.
_CPU_SHARE = 0.5
_CUDA_SHARE = 0.8
# Of a CPU's share, what sequences beyond `DEFAULT_MAX_MODEL_LEN` may use that nobody configured: a quarter of
# the available memory in all. The system commits it as tokens fill it. So servers that start beside this one
# count it as available too, and all would be killed once long sequences fill it.
_CPU_SHARE_OF_LONG = 0.5
_STEP = 64  # entries


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the memory that slots and scratches may take; None where it is unknown.

    On a CPU it is half of what is available.
    """
    if device.type == "cuda":
        return int(_CUDA_SHARE * torch.cuda.mem_get_info(device)[0])
    available = available_bytes(root)
    return None if available is None else int(_CPU_SHARE * available)


def slot_bytes(options: PoolOptions, layers: Sequence[LayerSpec], max_model_len: int) -> int:
    """Return the memory of a pool's slots, with equal shares of kept entries."""
    return sum(slots.num_bytes for slots in _unallocated(options, layers, max_model_len))


def _host_bytes(
    pools: Sequence[PoolOptions], layers: Sequence[LayerSpec], max_model_len: int, device: torch.device
) -> int:
    """Return those bytes of the pools' slots that are in the host's memory."""
    each = (slots for options in pools for slots in _unallocated(options, layers, max_model_len))
    return sum(slots.num_bytes if device.type == "cpu" else _pinned(slots.host_bytes) for slots in each)


def _pinned(num_bytes: int) -> int:
    """Return what torch's allocator of pinned memory takes: a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def _device_bytes(
    pools: Sequence[PoolOptions], layers: Sequence[LayerSpec], max_model_len: int, device: torch.device
) -> int:
    """Return those bytes of the pools' slots that are in the memory which `free_bytes` counts."""
    each = (slots for options in pools for slots in _unallocated(options, layers, max_model_len))
    is_cpu = device.type == "cpu"
    return sum(slots.num_bytes - (0 if is_cpu else slots.host_bytes) for slots in each)


def _unallocated(
    options: PoolOptions, layers: Sequence[LayerSpec], max_model_len: int
) -> Iterator[SlotCache]:
    kinds = layer_kinds(options.policy.resolve(max_model_len), layers, max_model_len)
    return (
        SlotCache(
            kind.policy.layout,
            options.num_slots,
            layer.num_kv_heads,
            layer.planes,
            "meta",
            kv_cache_dtype=options.kv_cache_dtype,
            store=kind.policy.store,
            states=layer.states,
        )
        for kind, layer in zip(kinds, layers, strict=True)
    )


def fitting_length(
    config: TorchBackendConfig,
    layers: Sequence[LayerSpec],
    limit: int,
    device: torch.device,
    num_unloaded_bytes: int = 0,
) -> int:
    """Return the longest sequence without a configured one, of a model whose own limit is `limit`.

    Of its weights, `num_unloaded_bytes` will take memory that is still available.

    It is the limit, or the largest power of two that fits in memory beside slots as long as those for
    `DEFAULT_MAX_MODEL_LEN`. It is never less than that, unless the limit is.
    """
    least = min(limit, DEFAULT_MAX_MODEL_LEN)
    free = _fillable_bytes(config, device, least, num_unloaded_bytes) if config.fills_memory else None
    if free is None:
        return least
    pools = sized_pools(config, layers, least, free, device)

    available = available_bytes()

    def pinned(length: int) -> int:
        return _host_bytes(pools, layers, length, device)

    def fits(length: int) -> bool:
        if device.type != "cpu" and available is not None and pinned(length) > _CPU_SHARE * available:
            return False
        fillable = _fillable_bytes(config, device, length, num_unloaded_bytes)
        taken = _device_bytes(pools, layers, length, device)
        return fillable is not None and taken + _scratch_bytes(config, layers, length) <= fillable

    lengths = [limit, *(1 << bits for bits in range(limit.bit_length() - 1, least.bit_length() - 1, -1))]
    return next(filter(fits, lengths), least)


def _fillable_bytes(
    config: TorchBackendConfig, device: torch.device, length: int, num_unloaded_bytes: int = 0
) -> int | None:
    """Return the memory that slots and scratches may take beside the stored prompts; None: unknown.

    `length` is that of the longest sequence.
    """
    free = free_bytes(device)
    if free is None or device.type != "cpu":  # else stored prompts are in other memory
        return free
    free -= int(_CPU_SHARE * num_unloaded_bytes)
    if config.max_model_len is None and length > DEFAULT_MAX_MODEL_LEN:
        free = int(_CPU_SHARE_OF_LONG * free)
    return free - prefix_bytes(config.prefix_cache_bytes, available_bytes())


def with_sizes(
    config: TorchBackendConfig, layers: Sequence[LayerSpec], max_model_len: int, device: torch.device
) -> TorchBackendConfig:
    """Return the config with a size for each pool and for the stored prompts, all of which fit together.

    Raises ValueError if the configured bytes for stored prompts do not fit.
    """
    available = available_bytes()
    if config.fills_memory:
        free = _fillable_bytes(config, device, max_model_len)
        config = replace(config, pools=sized_pools(config, layers, max_model_len, free, device))
    taken = _scratch_bytes(config, layers, max_model_len) if device.type == "cpu" else 0
    taken += _host_bytes(config.pools, layers, max_model_len, device)
    if device.type != "cpu" and available is not None and taken > available:
        raise ValueError(
            f"slots of policy sparse need {taken} bytes of the host's memory for their values, and "
            f"{available} are available: lower num_slots, slot_capacity or max_model_len"
        )
    num_bytes = fitting_prefix_bytes(config.prefix_cache_bytes, available, taken)
    return replace(config, prefix_cache_bytes=num_bytes)


def sized_pools(
    config: TorchBackendConfig,
    layers: Sequence[LayerSpec],
    max_model_len: int,
    free: int | None,
    device: torch.device,
) -> tuple[PoolOptions, ...]:
    """Return the pools with a capacity for those that have none: as many entries as fit into `free` bytes.

    It is at most `max_model_len` and at least the usual default, whether or not that fits. Pools without a
    capacity share what the others and the scratches leave.
    """
    unsized = [options for options in config.pools if options.policy.has_default_capacity]
    if free is None or not unsized:
        return config.pools
    sized = [options for options in config.pools if not options.policy.has_default_capacity]
    scratch = _scratch(config, max_model_len)
    taken = _scratch_bytes(config, layers, max_model_len)
    taken += _device_bytes(sized, layers, max_model_len, device)
    budget = (free - taken) // len(unsized)

    def with_capacity(options: PoolOptions, capacity: int) -> PoolOptions:
        return replace(options, policy=options.policy.with_default_capacity(capacity, max_model_len))

    def needed(options: PoolOptions, capacity: int) -> int:
        return slot_bytes(with_capacity(options, capacity), layers, max_model_len)

    def fitted(options: PoolOptions) -> PoolOptions:
        if not options.policy.has_default_capacity:
            return options
        # First, since slots that keep all tokens in order need no indices of those that they kept.
        if scratch.max_tokens == max_model_len and needed(options, max_model_len) <= budget:
            return with_capacity(options, max_model_len)
        # A slot that is filled from a scratch is smaller than that.
        most = min(scratch.max_tokens - HELD_WINDOW, max_model_len - 1)
        least = min(DEFAULT_CAPACITY, max_model_len)
        if scratch.max_tokens < max_model_len:
            least = max(min(least, most), 1)
        capacities = range(least, max(most, least) + 1, _STEP)
        num_fitting = bisect_right(capacities, budget, key=lambda capacity: needed(options, capacity))
        capacity = capacities[max(num_fitting - 1, 0)]
        if config.max_model_len is None and capacity > DEFAULT_MAX_MODEL_LEN:
            capacity = _rounded_down(capacity)
        if num_fitting > 0:
            logger.info(
                "slots of pool %s have %d entries: %d of them fit into %.1f GB, but not slots of %d",
                options.label,
                capacity,
                options.num_slots,
                budget / 1e9,
                max_model_len,
            )
        return with_capacity(options, capacity)

    return tuple(map(fitted, config.pools))


def _rounded_down(capacity: int) -> int:
    """Return the largest power of two, or half more than one, that is at most `capacity`.

    So a restart with a little more or less memory finds the compiled decode of the last one, which is of one
    length.
    """
    power = 1 << (capacity.bit_length() - 1)
    return power + power // 2 if capacity >= power + power // 2 else power


def _scratch(config: TorchBackendConfig, max_model_len: int) -> ScratchLayout:
    """Return a scratch of the config's size. The tokens that it reads ahead are few, and left out."""
    return ScratchLayout(min(config.scratch_capacity or max_model_len, max_model_len))


def _scratch_bytes(config: TorchBackendConfig, layers: Sequence[LayerSpec], max_model_len: int) -> int:
    layout = _scratch(config, max_model_len)
    caches = allocate_scratches(layout, config.num_scratch, layers, torch.device("meta"))
    return sum(cache.num_bytes for cache in caches)
