"""Chooses a replica: the one that has read the most of the prompt, then the one with most free slots.

A replica where two requests or more wait for each slot is passed over while another one has a free slot.

This is Ray's request-router interface, which Ray calls alpha. What a replica has read is known from what this
router sent there.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

MAX_PROMPT_BYTES = 4 * 1024 * 1024  # of a body that is read here, as the server's own default limit
BLOCK_BYTES = 256  # of a prompt's JSON: about a block of 64 tokens
MAX_BLOCKS = 256  # compared of one prompt
MAX_KNOWN = 16_384  # blocks remembered of one replica

# What a prompt is made of, in the order in which it is read, by the names of every API.
_PARTS = ("model", "tools", "system", "instructions", "messages", "prompt", "input")


def blocks_of(body: bytes | bytearray, owner: bytes) -> tuple[bytes, ...]:
    """Return the hashes of a prompt's blocks, each with all before it.

    Owners do not share prompts. A body that is no prompt, as an upload, has none.
    """
    if len(body) > MAX_PROMPT_BYTES:
        return ()
    try:
        request = json.loads(body)
        parts = [request[name] for name in _PARTS if name in request]
    except (ValueError, TypeError, RecursionError):
        return ()
    content = json.dumps(parts).encode()
    running = hashlib.blake2b(owner, digest_size=8)
    hashes = []
    for start in range(0, min(len(content) - BLOCK_BYTES, BLOCK_BYTES * MAX_BLOCKS) + 1, BLOCK_BYTES):
        running.update(content[start : start + BLOCK_BYTES])
        hashes.append(running.digest())
    return tuple(hashes)


class Prefixes:
    """The blocks that one replica has read lately."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def num_shared(self, blocks: Sequence[bytes]) -> int:
        """Return how many of a prompt's first blocks are known."""
        return next((count for count, block in enumerate(blocks) if block not in self._known), len(blocks))

    def add(self, blocks: Sequence[bytes]) -> None:
        # Backwards: of a prompt that is forgotten in part, the beginning stays.
        for block in reversed(blocks):
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


class SlotRouter(RequestRouter):
    """Requests have their blocks in the argument `blocks`. Replicas report `num_slots` and `num_free`."""

    def initialize_state(self, **_: Any) -> None:
        self._prefixes: dict[ReplicaID, Prefixes] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates in order of preference, one to a rank."""
        blocks = () if pending_request is None else pending_request.kwargs.get("blocks", ())
        # One that has just started has not reported yet. Replicas are alike.
        num_slots = max((_reported(replica, "num_slots", 0) for replica in candidate_replicas), default=0)
        num_free = {replica.replica_id: self._num_free(replica, num_slots) for replica in candidate_replicas}
        is_room = max(num_free.values(), default=0) > 0

        def preference(replica: RunningReplica) -> tuple[bool, int, int]:
            free = num_free[replica.replica_id]
            prefixes = self._prefixes.get(replica.replica_id)
            num_shared = 0 if prefixes is None else prefixes.num_shared(blocks)
            return not (is_room and free <= -2 * num_slots), num_shared, free

        return [[replica] for replica in sorted(candidate_replicas, key=preference, reverse=True)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, _result: ReplicaResult
    ) -> None:
        blocks = pending_request.kwargs.get("blocks", ())
        self._prefixes.setdefault(replica_id, Prefixes()).add(blocks)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        ids = {replica.replica_id for replica in replicas}
        self._prefixes = {key: known for key, known in self._prefixes.items() if key in ids}

    def _num_free(self, replica: RunningReplica, num_slots: int) -> int:
        """Return the free slots of a replica; negative if requests wait there."""
        # This router's own count is newer than the report, which comes once a second.
        num_sent = self.replica_queue_len_cache.get(replica.replica_id)
        return min(_reported(replica, "num_free", num_slots), num_slots - (num_sent or 0))


def _reported(replica: RunningReplica, name: str, default: int) -> int:
    return int(replica.routing_stats.get(name, default))
