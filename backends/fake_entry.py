"""The fake backend's entry in the registry. It needs no torch."""

from typing import ClassVar

from backends.clock import Clock
from backends.config import DEFAULT_MAX_MODEL_LEN, BackendConfig, ConfiguredBackend
from backends.entry import BackendEntry, OtherBackend
from backends.fake import FakeBackend, fake_spec, slot_pool
from backends.host_memory import available_bytes, prefix_bytes
from backends.interface import PrefixSpec
from backends.options import OptionGroup

_BLOCK_TOKENS = 128
_BLOCK_BYTES = 8 * _BLOCK_TOKENS  # a token id takes 8


class FakeOptions(OptionGroup):
    """The fake backend has no options."""

    title: ClassVar[str] = "Made-up tokens (`--backend fake`)"


def _create(config: BackendConfig, clock: Clock, vocab_size: int) -> FakeBackend:
    max_model_len = config.max_model_len or DEFAULT_MAX_MODEL_LEN
    pools = [
        slot_pool(pool.num_slots, pool.policy.resolve(max_model_len), max_model_len, pool.label)
        for pool in config.pools
    ]
    num_bytes = prefix_bytes(config.prefix_cache_bytes, available_bytes())
    spec = fake_spec(
        max_model_len=max_model_len,
        pools=pools,
        num_scratch=config.num_scratch,
        vocab_size=vocab_size,
        prefixes=PrefixSpec(num_bytes // _BLOCK_BYTES, _BLOCK_TOKENS, _BLOCK_BYTES),
    )
    return FakeBackend(spec, clock=clock)


def _configure(
    base: BackendConfig, _options: FakeOptions, _other: OtherBackend
) -> ConfiguredBackend[BackendConfig]:
    if base.prefix_cache_dir is not None:
        raise ValueError("prefix_cache_dir needs backend torch: the fake backend writes no blocks")
    if base.prefix_cache_dtype.is_rounded:
        raise ValueError("prefix_cache_dtype must be auto with backend fake, which stores no numbers")
    return ConfiguredBackend(base, _create)


ENTRY = BackendEntry(FakeOptions, _configure)
