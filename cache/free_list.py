"""Which of a fixed number of slots, or of scratches, are free, and who holds the others.

These are indices and names: this module knows nothing of tensors, layouts or requests.
"""

import heapq


class FreeList:
    """Indices 0 to `size` − 1, each free or held. A holder may have several."""

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"size must be at least 0, got {size}")
        self._free = list(range(size))  # a heap
        self._holders: list[str | None] = [None] * size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._holders) - len(self._free)

    def acquire(self, holder: str) -> int:
        """Give `holder` the lowest free index. Raises RuntimeError when none is free.

        The lowest, because a decode step runs over the first slots up to the highest in use.
        """
        if not self._free:
            raise RuntimeError(f"{holder} cannot acquire an index: all {len(self._holders)} are held")
        index = heapq.heappop(self._free)
        self._holders[index] = holder
        return index

    def release(self, index: int) -> None:
        """Take an index back. Raises RuntimeError when it is free."""
        if self.holder(index) is None:
            raise RuntimeError(f"index {index} was released, but it is free")
        self._holders[index] = None
        heapq.heappush(self._free, index)

    def holder(self, index: int) -> str | None:
        """Return who holds an index, or None when it is free. Raises IndexError when it is out of range."""
        if not 0 <= index < len(self._holders):
            raise IndexError(f"index must be from 0 to {len(self._holders) - 1}, got {index}")
        return self._holders[index]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every index is either free, once, or held."""
        without_holder = [index for index, holder in enumerate(self._holders) if holder is None]
        if sorted(self._free) != without_holder:
            raise AssertionError(
                f"indices listed free are {sorted(self._free)}, those without a holder are {without_holder}"
            )
