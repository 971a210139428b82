"""The cost model of `TimedBackend`: the time of a batch on a deployment."""

from functools import lru_cache

from backends.interface import Batch, PrefillBatch, PrefillRow, SlotPoolSpec
from backends.sn40l.decode import decode_seconds
from backends.sn40l.deployment import DecodeShape, Deployment
from backends.sn40l.prefill import Chunk, Compression, prefill_seconds
from cache.policy import CachePolicy


class DeploymentCost:
    """Times batches for the slots of these pools.

    A static machine has one decode graph for each pool, with all slots at full capacity, however many are
    live. Other machines are timed for the batch's rows. Prompts are read one row after another, each chunk
    padded to the batch's shape. Raises DoesNotFitError for pools that do not fit together. The check assumes
    slots of their mean capacity.
    """

    def __init__(self, deployment: Deployment, *pools: SlotPoolSpec) -> None:
        self._deployment = deployment
        self._pools = pools
        self._decode = lru_cache(maxsize=None)(self._decode_seconds)
        self._prefill = lru_cache(maxsize=4096)(self._prefill_seconds)
        num_slots = sum(pool.num_slots for pool in pools)
        self._decode(
            num_slots, -(-sum(pool.num_slots * pool.policy.layout.capacity for pool in pools) // num_slots)
        )

    def seconds(self, batch: Batch) -> float:
        pool = self._pools[batch.pool]
        if isinstance(batch, PrefillBatch):
            chunks = [_chunk(row, batch.shape.num_tokens, pool.policy) for row in batch.rows]
            chunks += [_votes(row) for row in batch.rows if row.echo or row.ahead]
            return sum(map(self._prefill, chunks))
        num_rows = pool.num_slots if self._deployment.machine.is_static else len(batch.rows)
        return batch.num_steps * self._decode(num_rows, pool.policy.layout.capacity)

    def _decode_seconds(self, batch: int, capacity: int) -> float:
        return decode_seconds(self._deployment, DecodeShape(batch, capacity))

    def _prefill_seconds(self, chunk: Chunk) -> float:
        return prefill_seconds(self._deployment, chunk)


def _chunk(row: PrefillRow, num_tokens: int, policy: CachePolicy) -> Chunk:
    compresses = row.is_last and row.scratch is not None
    return Chunk(num_tokens, row.start, compression_of(policy) if compresses else None)


def _votes(row: PrefillRow) -> Chunk:
    """Return the tokens that are read only for their votes, as a chunk behind the prompt."""
    return Chunk(len(row.echo) + len(row.ahead), row.num_prompt_tokens, None)


def compression_of(policy: CachePolicy) -> Compression | None:
    """Return the compression of a prompt longer than its slot. None if the policy drops nothing."""
    if not policy.evicts and policy.scorer is None:
        return None
    layout = policy.layout
    window = policy.scorer.observation_window if policy.scorer else 0
    return Compression(layout.num_recent, layout.num_kept, window)
