"""The cost model of `TimedBackend`: the time of a batch on a deployment."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from backends.interface import Batch, DecodeBatch, PrefillBatch, PrefillRow, SlotPoolSpec
from backends.sn40l.step.deployment import DecodeShape, Deployment
from backends.sn40l.step.prefill import Chunk, Compression, prefill_seconds
from backends.sn40l.step.speculation import Speculation, token_seconds
from cache.policy import CachePolicy

_GRID = 32  # steps of a slot's capacity for which decode is computed
_TOKENS = 16  # of a matrix tile: chunks that are not padded to their shape fill whole tiles


class DeploymentCost:
    """Times batches for the slots of these pools.

    Where the machine pads decode, each pool has one graph with all slots at full capacity, however many are
    live. Elsewhere a step is timed for the batch's rows and for the entries that they hold on average.
    Prompts are read one row after another. Each chunk is padded to the batch's shape where the machine pads
    prefill, elsewhere to whole tiles. A pool without slots is a
    draft's, which only scores prompts. With `speculation`, a step is what a token takes on average.

    Raises DoesNotFitError for pools that do not fit together: at `resident_entries` a slot if memory is
    paged, else at the mean capacity.
    """

    def __init__(
        self,
        deployment: Deployment,
        *pools: SlotPoolSpec,
        resident_entries: int | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._deployment = deployment
        self._speculation = speculation
        self._pools = pools
        self._decode = lru_cache(maxsize=None)(self._decode_seconds)
        self._prefill = lru_cache(maxsize=65536)(self._prefill_seconds)
        if any(pool.num_slots > 0 for pool in pools):
            self._decode(_mean_shape(pools, resident_entries))

    def seconds(self, batch: Batch) -> float:
        pool = self._pools[batch.pool]
        if isinstance(batch, PrefillBatch):
            chunks = [_chunk(row, self._num_tokens(batch, row), pool.policy) for row in batch.rows]
            chunks += [_votes(row) for row in batch.rows if row.echo or row.ahead]
            return sum(map(self._prefill, chunks)) + sum(map(self._look_ahead, batch.rows))
        if self._deployment.machine.pads_decode:
            return batch.num_steps * self._decode(DecodeShape.of(pool.policy, pool.num_slots))
        return batch.num_steps * self._resident_seconds(batch, pool.policy)

    def _num_tokens(self, batch: PrefillBatch, row: PrefillRow) -> int:
        """Return the tokens that a row takes the time of."""
        if self._deployment.machine.pads_prefill:
            return batch.shape.num_tokens
        return _TOKENS * max(1, -(-len(row.token_ids) // _TOKENS))

    def _look_ahead(self, row: PrefillRow) -> float:
        """Return the seconds of the tokens that a draft decodes behind a prompt, to score it by them."""
        if row.importance is None or not row.is_last or row.importance.num_ahead < 2:
            return 0.0
        return (row.importance.num_ahead - 1) * self._decode(DecodeShape(1, row.num_prompt_tokens))

    def _resident_seconds(self, batch: DecodeBatch, policy: CachePolicy) -> float:
        """Return the seconds of a step at the rows' mean entries, halfway through the batch's steps.

        They are a line between the two nearest of a grid, so that few steps have to be computed.
        """
        ahead, capacity = batch.num_steps // 2 + 1, policy.capacity
        entries = sum(min(row.index + ahead, capacity) for row in batch.rows) / len(batch.rows)
        spacing = max(1, capacity // _GRID)
        below = max(1, int(entries // spacing) * spacing)
        above = min(below + spacing, capacity)
        start = self._decode(DecodeShape.of(policy, len(batch.rows), below))
        if above <= below:
            return start
        share = max(0.0, entries - below) / (above - below)
        end = self._decode(DecodeShape.of(policy, len(batch.rows), above))
        return start + share * (end - start)

    def _decode_seconds(self, shape: DecodeShape) -> float:
        return token_seconds(self._deployment, shape, self._speculation)

    def _prefill_seconds(self, chunk: Chunk) -> float:
        return prefill_seconds(self._deployment, chunk)


def _mean_shape(pools: Sequence[SlotPoolSpec], resident_entries: int | None) -> DecodeShape:
    """Return the shape of all slots together, each with the pools' mean numbers of entries."""
    shapes = [DecodeShape.of(pool.policy, pool.num_slots) for pool in pools if pool.num_slots > 0]
    num_slots = sum(one.batch for one in shapes)

    def mean(sizes: Iterable[int]) -> int:
        return -(-sum(one.batch * size for one, size in zip(shapes, sizes, strict=True)) // num_slots)

    capacity = resident_entries or mean(one.capacity for one in shapes)
    if all(one.num_exact is None for one in shapes):
        return DecodeShape(num_slots, capacity)
    exact = mean(one.capacity if one.num_exact is None else one.num_exact for one in shapes)
    return DecodeShape(num_slots, capacity, exact, mean(one.num_attended for one in shapes))


def _chunk(row: PrefillRow, num_tokens: int, policy: CachePolicy) -> Chunk:
    if row.importance is not None and row.is_last:
        num_tail = policy.scorer.observation_window if policy.scorer is not None else 1
        num_queries = row.importance.num_ahead or num_tail
        return Chunk(num_tokens, row.start, Compression(0, 0, num_queries))
    packs = row.is_last and bool(row.slots)
    return Chunk(num_tokens, row.start, compression_of(policy, row.num_prompt_tokens) if packs else None)


def _votes(row: PrefillRow) -> Chunk:
    """Return the tokens that are read only for their votes, as a chunk behind the prompt."""
    return Chunk(len(row.echo) + len(row.ahead), row.num_prompt_tokens, None)


def compression_of(policy: CachePolicy, num_prompt_tokens: int) -> Compression | None:
    """Return the compression of a prompt; None if its slot holds all of it.

    Such a prompt may be read in a scratch, too. Copying it from there is left out.
    """
    if not policy.must_choose(num_prompt_tokens):
        return None
    layout = policy.layout
    if policy.store is not None:
        return Compression(layout.num_recent, 0, 0, num_prompt_tokens - policy.max_exact_prompt)
    if not (policy.evicts or policy.scorer):
        return None
    window = policy.scorer.observation_window if policy.scorer else 0
    return Compression(layout.num_recent, layout.num_kept, window)
