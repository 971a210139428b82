"""One of the backend's pools: its slots, and the sequences that decode in them."""

from dataclasses import dataclass, field

from backends.interface import SlotPoolSpec
from cache.free_list import FreeList
from scheduler.request import Request


@dataclass(slots=True, eq=False)
class PoolState:
    """What is free in one never depends on another."""

    number: int
    spec: SlotPoolSpec
    slots: FreeList = field(init=False)
    decoding: dict[int, Request] = field(init=False, default_factory=dict)  # by slot

    def __post_init__(self) -> None:
        self.slots = FreeList(self.spec.num_slots)
