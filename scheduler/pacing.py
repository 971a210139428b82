"""How reading prompts and decoding share the device: running estimates of how long steps take, and the choices that follow from them.

Estimates are kept by static shape and by the power of two of the context, since a chunk's attention grows with what stands before it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from backends.interface import Batch, DecodeBatch, PrefillShape
from scheduler.prefill import Prefill

_SECONDS_PER_TOKEN = 1e-3  # assumed until the first prefill was timed: a slow processor
_SMOOTHING = 0.3  # weight of the newest step in a running estimate
_ROUNDING = 1e-9  # seconds: sums of floats must not decide whether a step fits
_NOISE = 0.1  # share of a rate: estimates that differ by less do not decide


@dataclass(frozen=True, slots=True)
class _Plan:
    """A prefill step that could be next."""

    shape: PrefillShape
    num_first_tokens: int  # of the first prompt
    num_tokens: int  # of prompts, without padding
    seconds: float  # expected
    is_timed: bool  # a step like it has been run

    @property
    def merit(self) -> float:
        """Prompt tokens a second; a step never timed may take half of what is expected, so that larger shapes get a trial."""
        return self.rate() if self.is_timed else 2 * self.rate()

    def rate(self, seconds_besides: float = 0.0) -> float:
        """Return the prompt tokens a second, where each such step comes with so much else."""
        return self.num_tokens / max(self.seconds + seconds_besides, _ROUNDING)


class Pacing:
    """Decides how large the next prefill step may be, whether decode goes first, and how many steps a decode launch has."""

    def __init__(self, shapes: Sequence[PrefillShape], max_inter_token_latency: float) -> None:
        self._shapes = shapes
        self._max_inter_token_latency = max_inter_token_latency
        self._prefill_seconds: dict[tuple[PrefillShape, int], float] = {}
        self._similar: dict[
            tuple[PrefillShape, int], tuple[PrefillShape, int]
        ] = {}  # of those never timed, the most similar one that was
        self._decode_seconds: dict[int, float] = {}  # of one step, by pool
        self._has_read_since_decode = False
        self._decode_waits_since = 0.0

    def max_decode_steps(self, decoding: Collection[int], now: float) -> int | None:
        """Return how many steps of each of these pools fit before their next tokens are due, reading included; None for any number."""
        left = self._max_inter_token_latency - (
            now - self._decode_waits_since if self._has_read_since_decode else 0.0
        )
        seconds = self._round_seconds(decoding)
        if left > 0.0 and (seconds == 0.0 or left == float("inf")):
            return None
        return max(1, int((left + _ROUNDING) / max(seconds, _ROUNDING)))

    def mark_decode_due(self, now: float) -> None:
        """Note that there are live sequences from now on whose next token somebody waits for."""
        self._decode_waits_since = now

    def choose_shape(
        self, prompts: Sequence[Prefill], now: float, decoding: Collection[int]
    ) -> PrefillShape | None:
        """Return the shape in which to read the first of `prompts` next, or None when decode, in the pools `decoding`, goes first.

        Of shapes that are about as fast, the one that reads most of the first prompt.
        """
        plans: Sequence[_Plan] = [self._plan(shape, prompts) for shape in self._shapes]
        if decoding:
            plans = self._in_time(plans, now, self._round_seconds(decoding))
        if not plans:
            return None
        least = (1 - _NOISE) * max(plan.merit for plan in plans)
        best = max(
            (plan for plan in plans if plan.merit >= least),
            key=lambda plan: (plan.num_first_tokens, plan.num_tokens, plan.merit),
        )
        self._has_read_since_decode = True
        return best.shape

    def _in_time(self, plans: Sequence[_Plan], now: float, decode_seconds: float) -> Sequence[_Plan]:
        """Return the plans that fit before the next tokens are due, and read no slower than one of the next gap would, decode and all."""
        most = self._max_inter_token_latency - decode_seconds + _ROUNDING
        left = self._decode_waits_since - now + most
        in_time = [plan for plan in plans if plan.seconds <= left]
        if not self._has_read_since_decode:
            return in_time or [min(plans, key=lambda plan: plan.seconds)]
        next_rate = max((plan.rate(decode_seconds) for plan in plans if plan.seconds <= most), default=0.0)
        return [plan for plan in in_time if plan.rate() >= next_rate]

    def observe(self, batch: Batch, elapsed: float, now: float) -> None:
        """Learn from a step that was run."""
        if isinstance(batch, DecodeBatch):
            self._decode_seconds[batch.pool] = _blend(
                self._decode_seconds.get(batch.pool), elapsed / batch.num_steps
            )
            self._decode_waits_since = now
            self._has_read_since_decode = False
            return
        magnitude = _magnitude(max(row.start + len(row.token_ids) for row in batch.rows))
        if (batch.shape, magnitude) not in self._prefill_seconds:
            self._similar.clear()
        self._learn(batch.shape, magnitude, elapsed)
        for larger in self._shapes:  # takes no longer than such steps for as many tokens: one that was too slow once gets another trial
            most = elapsed * _num_padded(larger) / _num_padded(batch.shape)
            if most > elapsed and self._prefill_seconds.get((larger, magnitude), 0.0) > most:
                self._learn(larger, magnitude, most)

    def _learn(self, shape: PrefillShape, magnitude: int, seconds: float) -> None:
        self._prefill_seconds[shape, magnitude] = _blend(
            self._prefill_seconds.get((shape, magnitude)), seconds
        )

    def _round_seconds(self, decoding: Collection[int]) -> float:
        """Each pool decodes before any decodes again."""
        return sum(self._decode_seconds.get(pool, 0.0) for pool in decoding)

    def _plan(self, shape: PrefillShape, prompts: Sequence[Prefill]) -> _Plan:
        """The first prompts, as many as the shape has rows."""
        ends = [prompt.chunk_end(shape.num_tokens) for prompt in prompts[: shape.num_rows]]
        chunks = [end - prompt.num_computed_tokens for prompt, end in zip(prompts, ends, strict=False)]
        magnitude = _magnitude(max(ends))
        timed = self._prefill_seconds.get((shape, magnitude))
        seconds = self._guess(shape, magnitude) if timed is None else timed
        return _Plan(shape, chunks[0], sum(chunks), seconds, is_timed=timed is not None)

    def _guess(self, shape: PrefillShape, magnitude: int) -> float:
        """From the most similar step that was timed, in proportion to the shapes' tokens."""
        if not self._prefill_seconds:
            return _num_padded(shape) * _SECONDS_PER_TOKEN
        similar = self._similar.get((shape, magnitude))
        if similar is None:
            similar = min(
                self._prefill_seconds, key=lambda timed: (timed[0] != shape, abs(timed[1] - magnitude))
            )
            self._similar[shape, magnitude] = similar
        return self._prefill_seconds[similar] * _num_padded(shape) / _num_padded(similar[0])


def _blend(estimate: float | None, seconds: float) -> float:
    return seconds if estimate is None else estimate + _SMOOTHING * (seconds - estimate)


def _num_padded(shape: PrefillShape) -> int:
    return shape.num_rows * shape.num_tokens


def _magnitude(context: int) -> int:
    return context.bit_length()
