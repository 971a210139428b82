"""The runtime state of one of the backend's pools: its free slots, and the sequences that decode."""

from dataclasses import dataclass, field

from backends.interface import SlotPoolSpec
from cache.free_list import FreeList
from scheduler.request import Request


@dataclass(slots=True, eq=False)
class PoolState:
    """One pool. Its slots are independent of those of the other pools."""

    index: int  # through all models
    spec: SlotPoolSpec
    model: int  # index in `BackendSpec.models`
    slots: FreeList = field(init=False)
    decoding: dict[int, Request] = field(init=False, default_factory=dict)  # by slot

    def __post_init__(self) -> None:
        self.slots = FreeList(self.spec.num_slots)
