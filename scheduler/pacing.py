"""How reading prompts and decoding share the device: running estimates of how long steps take, and the choices that follow from them.

Estimates are kept by static shape and by the power of two of the context, since a chunk's attention grows with what stands before it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from backends.interface import Batch, DecodeBatch, PrefillShape
from scheduler.prefill import Prefill

_SECONDS_PER_TOKEN = 1e-3  # assumed until the first prefill was timed: a slow processor
_SMOOTHING = 0.3  # weight of the newest step in a running estimate
_ROUNDING = 1e-9  # seconds: sums of floats must not decide whether a step fits


@dataclass(frozen=True, slots=True)
class _Plan:
    """A prefill step that could be next."""

    shape: PrefillShape
    num_tokens: int  # of prompts, without padding
    seconds: float  # expected
    is_timed: bool  # a step like it has been run

    @property
    def merit(self) -> tuple[float, int]:
        """Prompt tokens a second; a step never timed may take half of what is expected, so that larger shapes get a trial."""
        seconds = self.seconds if self.is_timed else self.seconds / 2
        return self.num_tokens / max(seconds, _ROUNDING), self.num_tokens


class Pacing:
    """Decides how large the next prefill step may be, whether decode goes first, and how many steps a decode launch has."""

    def __init__(self, shapes: Sequence[PrefillShape], max_inter_token_latency: float) -> None:
        self._shapes = shapes
        self._max_inter_token_latency = max_inter_token_latency
        self._prefill_seconds: dict[tuple[PrefillShape, int], float] = {}
        self._similar: dict[tuple[PrefillShape, int], tuple[PrefillShape, int]] = {}  # of those never timed, the most similar one that was
        self._decode_seconds: dict[int, float] = {}  # of one step, by pool
        self._has_read_since_decode = False
        self._decode_waits_since = 0.0

    def max_decode_steps(self, decoding: Collection[int]) -> int | None:
        """Return how many steps of each of these pools fit between two deliveries of tokens; None for any number."""
        seconds = self._round_seconds(decoding)
        if seconds == 0.0 or self._max_inter_token_latency == float("inf"):
            return None
        return max(1, int((self._max_inter_token_latency + _ROUNDING) / seconds))

    def start_waiting(self, now: float) -> None:
        """Note that there are live sequences from now on whose next token somebody waits for."""
        self._decode_waits_since = now

    def choose_shape(self, prompts: Sequence[Prefill], now: float, decoding: Collection[int]) -> PrefillShape | None:
        """Return the shape in which to read the first of `prompts` next, or None when decode, in the pools `decoding`, goes first."""
        plans: Iterable[_Plan] = [self._plan(shape, prompts) for shape in self._shapes]
        if decoding:
            cheapest = min(plans, key=lambda plan: plan.seconds)
            budget = self._decode_waits_since + self._max_inter_token_latency - now - self._round_seconds(decoding) + _ROUNDING
            plans = [plan for plan in plans if plan.seconds <= budget]
            if not plans and not self._has_read_since_decode:
                plans = [cheapest]
        best = max(plans, key=lambda plan: plan.merit, default=None)
        if best is None:
            return None
        self._has_read_since_decode = True
        return best.shape

    def observe(self, batch: Batch, elapsed: float, now: float) -> None:
        """Learn from a step that was run."""
        if isinstance(batch, DecodeBatch):
            self._decode_seconds[batch.pool] = _blend(self._decode_seconds.get(batch.pool), elapsed / batch.num_steps)
            self._decode_waits_since = now
            self._has_read_since_decode = False
            return
        key = (batch.shape, _magnitude(max(row.start + len(row.token_ids) for row in batch.rows)))
        if key not in self._prefill_seconds:
            self._similar.clear()
        self._prefill_seconds[key] = _blend(self._prefill_seconds.get(key), elapsed)

    def _round_seconds(self, decoding: Collection[int]) -> float:
        """Each pool decodes before any decodes again."""
        return sum(self._decode_seconds.get(pool, 0.0) for pool in decoding)

    def _plan(self, shape: PrefillShape, prompts: Sequence[Prefill]) -> _Plan:
        """The first prompts, as many as the shape has rows."""
        num_tokens, context = 0, 0
        for prompt in prompts[: shape.num_rows]:
            chunk = min(prompt.num_remaining_tokens, shape.num_tokens)
            num_tokens += chunk
            context = max(context, prompt.num_computed_tokens + chunk)
        seconds = self._prefill_seconds.get((shape, _magnitude(context)))
        if seconds is not None:
            return _Plan(shape, num_tokens, seconds, is_timed=True)
        return _Plan(shape, num_tokens, self._guess(shape, _magnitude(context)), is_timed=False)

    def _guess(self, shape: PrefillShape, magnitude: int) -> float:
        """From the most similar step that was timed, in proportion to the shapes' tokens."""
        if not self._prefill_seconds:
            return _num_padded(shape) * _SECONDS_PER_TOKEN
        similar = self._similar.get((shape, magnitude))
        if similar is None:
            similar = min(self._prefill_seconds, key=lambda timed: (timed[0] != shape, abs(timed[1] - magnitude)))
            self._similar[shape, magnitude] = similar
        return self._prefill_seconds[similar] * _num_padded(shape) / _num_padded(similar[0])


def _blend(estimate: float | None, seconds: float) -> float:
    return seconds if estimate is None else estimate + _SMOOTHING * (seconds - estimate)


def _num_padded(shape: PrefillShape) -> int:
    return shape.num_rows * shape.num_tokens


def _magnitude(context: int) -> int:
    return context.bit_length()
