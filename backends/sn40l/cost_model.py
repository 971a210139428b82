"""The time of a batch on a deployment: what `TimedBackend` asks for each step."""

from functools import lru_cache

from backends.interface import Batch, PrefillBatch, PrefillRow, SlotPoolSpec
from backends.sn40l.decode import decode_step
from backends.sn40l.deployment import DecodeShape, Deployment
from backends.sn40l.prefill import Chunk, Compression, prefill_step
from cache.policy import CachePolicy


class DeploymentCost:
    """Times batches for slots of one pool.

    A static machine has one decode graph, for all slots at their full capacity, whatever is live; others are timed for the batch's rows.
    Prompts are read one row after another, each chunk padded to the batch's shape. Raises DoesNotFitError for a pool that does not fit.
    """

    def __init__(self, deployment: Deployment, pool: SlotPoolSpec) -> None:
        self._deployment, self._num_slots, self._policy = deployment, pool.num_slots, pool.policy
        self._decode = lru_cache(maxsize=None)(self._decode_seconds)
        self._prefill = lru_cache(maxsize=4096)(self._prefill_seconds)
        self._decode(pool.num_slots)

    def seconds(self, batch: Batch) -> float:
        if isinstance(batch, PrefillBatch):
            return sum(self._prefill(self._chunk(row, batch.shape.num_tokens)) for row in batch.rows)
        num_rows = self._num_slots if self._deployment.machine.is_static else len(batch.rows)
        return batch.num_steps * self._decode(num_rows)

    def _chunk(self, row: PrefillRow, num_tokens: int) -> Chunk:
        compresses = row.is_last and row.scratch is not None
        return Chunk(num_tokens, row.start, compression_of(self._policy) if compresses else None)

    def _decode_seconds(self, batch: int) -> float:
        return decode_step(self._deployment, DecodeShape(batch, self._policy.layout.capacity)).seconds

    def _prefill_seconds(self, chunk: Chunk) -> float:
        return prefill_step(self._deployment, chunk).seconds


def compression_of(policy: CachePolicy) -> Compression | None:
    """Return what a policy does to a prompt longer than its slot; None where nothing is dropped."""
    if not policy.evicts and policy.scorer is None:
        return None
    layout, window = policy.layout, policy.scorer.observation_window if policy.scorer else 0
    return Compression(layout.num_recent, layout.num_kept, window)
