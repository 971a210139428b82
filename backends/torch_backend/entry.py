"""The torch backend's entry in the registry."""

import gc

from backends.clock import Clock
from backends.config import BackendConfig, ConfiguredBackend
from backends.entry import BackendEntry, OtherBackend
from backends.interface import Backend
from backends.torch_backend.config import TorchBackendConfig, TorchOptions


def _create(config: TorchBackendConfig, clock: Clock, _vocab_size: int) -> Backend:
    from backends.torch_backend.backend import TorchBackend  # imports torch, which takes seconds

    if not gc.isenabled():
        # A server that loads. The many objects of its imports stay: each of its two full collections would
        # go through them, for 0.3 s.
        gc.freeze()
    return TorchBackend(config, clock)


def _configure(
    base: BackendConfig, options: TorchOptions, _other: OtherBackend
) -> ConfiguredBackend[TorchBackendConfig]:
    config = TorchBackendConfig(
        model=base.model,
        pools=base.pools,
        max_model_len=base.max_model_len,
        num_scratch=base.num_scratch,
        scratch_capacity=base.scratch_capacity,
        prefill_chunk=base.prefill_chunk,
        fills_memory=base.fills_memory,
        prefix_cache_bytes=base.prefix_cache_bytes,
        prefix_cache_dtype=base.prefix_cache_dtype,
        prefix_cache_dir=base.prefix_cache_dir,
        prefix_cache_disk_bytes=base.prefix_cache_disk_bytes,
        is_draft=base.is_draft,
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        compile=options.compile,
        compile_cache=options.compile_cache,
        require_compiled=options.require_compiled and not base.is_draft,
    )
    return ConfiguredBackend(config, _create)


ENTRY = BackendEntry(TorchOptions, _configure)
