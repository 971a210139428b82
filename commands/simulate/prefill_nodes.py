"""Nodes that read prompts for a decode node, and the blocks of prompts that they have stored."""

import math
from collections import OrderedDict

from backends.timed import SimulatedStore
from commands.simulate.arrivals import Arrival


class Blocks:
    """The blocks that prefill nodes have stored together, the least recently used first."""

    def __init__(self, store: SimulatedStore, num_nodes: int) -> None:
        self._most = num_nodes * store.spec.num_blocks
        self._seconds = store.spec.block_bytes / store.bandwidth  # of copying one
        self._since: OrderedDict[int, float] = OrderedDict()

    def known(self, arrival: Arrival, now: float) -> tuple[int, float]:
        """Return how many first blocks of a prompt are stored, and the seconds of copying all of its blocks.

        Those that are not stored are copied into the store later.
        """
        count = 0
        for block in arrival.block_ids:
            if self._since.get(block, math.inf) > now:
                break
            self._since.move_to_end(block)
            count += 1
        return count, len(arrival.block_ids) * self._seconds

    def store(self, arrival: Arrival, now: float) -> None:
        for block in arrival.block_ids:
            self._since.setdefault(block, now)
        while len(self._since) > self._most:
            self._since.popitem(last=False)
