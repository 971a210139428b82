"""A pool of slots as users configure it."""

import enum
import re
from dataclasses import dataclass, field

from cache.policy import PolicyName
from cache.policy_options import PolicyOptions


class KVCacheDtype(enum.StrEnum):
    """The type of a slot's keys and values, or of stored prompts'."""

    AUTO = "auto"  # the model's
    INT8 = "int8"  # with a scale for each token and KV head
    FP8 = "fp8"  # e4m3, with such a scale

    @property
    def is_rounded(self) -> bool:
        """Whether less is held than what the model computes."""
        return self is not KVCacheDtype.AUTO


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Slots of one policy. Requests choose the pool by `name`, or by its policy's name if that is empty.

    A pool without slots reads prompts that are only scored.
    """

    num_slots: int = 8
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    name: str = ""
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO

    def __post_init__(self) -> None:
        if self.num_slots < 0:
            raise ValueError(f"num_slots must be at least 0, got {self.num_slots}")
        if re.fullmatch(r"[A-Za-z0-9_.-]{0,64}", self.name) is None:
            raise ValueError(
                f"name must be up to 64 letters, digits, dots, dashes and underscores, got {self.name!r}"
            )
        if self.kv_cache_dtype.is_rounded and self.policy.name is PolicyName.SPARSE:
            raise ValueError(
                f"kv_cache_dtype must be auto for policy {self.policy.name}, got {self.kv_cache_dtype}"
            )

    @property
    def label(self) -> str:
        """The name by which requests choose the pool."""
        return self.name or self.policy.name


def check_names(pools: tuple[PoolOptions, ...]) -> None:
    """Raise ValueError unless there is a pool, and no two have the same label."""
    labels = [pool.label for pool in pools]
    if not labels:
        raise ValueError("at least one pool is needed")
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"{labels.count(label)} pools have the name {label}")
