"""Which of a fixed number of places is free, and who holds the others.

The places may be slots or scratches: this module knows numbers and names, nothing of tensors, layouts or requests.
"""

import heapq


class SlotPool:
    """Places 0 to `num_slots` − 1, each free or held. A holder may have several."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"num_slots must be at least 0, got {num_slots}")
        self._free = list(range(num_slots))  # a heap
        self._holders: list[str | None] = [None] * num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._holders) - len(self._free)

    def acquire(self, holder: str) -> int:
        """Give `holder` the lowest free slot. Raises RuntimeError when none is free."""
        if not self._free:
            raise RuntimeError(f"{holder} asked for a slot, but all {len(self._holders)} are held")
        slot = heapq.heappop(self._free)
        self._holders[slot] = holder
        return slot

    def release(self, slot: int) -> None:
        """Take the slot back. Raises RuntimeError when nobody holds it."""
        if self.holder(slot) is None:
            raise RuntimeError(f"slot {slot} was released, but nobody holds it")
        self._holders[slot] = None
        heapq.heappush(self._free, slot)

    def holder(self, slot: int) -> str | None:
        """Return who holds the slot, or None when it is free. Raises IndexError when there is no such slot."""
        if not 0 <= slot < len(self._holders):
            raise IndexError(f"there is no slot {slot} among {len(self._holders)}")
        return self._holders[slot]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is either free, once, or held."""
        without_holder = [slot for slot, holder in enumerate(self._holders) if holder is None]
        if sorted(self._free) != without_holder:
            raise AssertionError(
                f"slots listed as free are {sorted(self._free)}, slots without a holder are {without_holder}"
            )
