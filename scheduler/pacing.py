"""How prefill and decode share the device, from running estimates of how long each step takes.

It maximises prompt tokens read a second, while no live sequence waits longer than `max_inter_token_latency`
(the gap) for its next token. Example: the gap is 200 ms, a decode step takes 10 ms, a chunk of 256 tokens 128
ms and one of 32 tokens 40 ms. The first chunk of a gap is the large one: 2,000 tokens/s. It leaves 62 ms, in
which only the small chunk fits, at 800 tokens/s. To decode at once and start the next gap with a large chunk
yields 256 tokens in 138 ms, 1,855 tokens/s. So decode goes first.

Estimates are kept by shape, for contexts of powers of two, and interpolated between them: a chunk's attention
grows with the tokens before it. Steps scatter about their estimates. So that 99 of 100 end in time, a step
must fit with a multiple of the mean error.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backends.interface import Batch, DecodeBatch, PrefillBatch, PrefillShape
from scheduler.prefill import Prefill

_SECONDS_PER_TOKEN = 1e-3  # assumed until the first prefill is timed: a slow processor
_SMOOTHING = 0.3  # weight of the newest step in a running estimate
_ERROR_SMOOTHING = 0.05  # in the mean error: one late step must not exclude large shapes for long; our guess
_LATE = 2.9  # mean errors above the mean, which 1 % of normally distributed times exceed
_LARGEST_ERROR = 1.0  # relative; a step that took ten times as long says little about the next
_ROUNDING = 1e-9  # seconds: the rounding of sums must not decide whether a step fits
_NOISE = 0.1  # share of a rate: plans whose rates differ by less count as equally fast
_BRIEF_COST = 0.2  # share of the best rate that brief steps may cost; our guess
_MIN_GAIN = 1.5  # times that a step of all sequences takes as long as one of few, so that the others skip it
_FIRST_DISTANCE = 64  # steps of all until a step of few is tried again, twice as many after each failure
_MAX_DISTANCE = 1024


class _Plan(NamedTuple):
    """A candidate for the next prefill step."""

    shape: PrefillShape
    num_first_tokens: int  # of the first prompt
    num_tokens: int  # of all prompts, without padding
    seconds: float  # expected
    latest_seconds: float  # exceeded by about one step of a hundred
    is_timed: bool  # `seconds` comes from steps of this shape and about this context

    @property
    def optimistic_rate(self) -> float:
        """Prompt tokens a second.

        A step never timed may take half of its guess, so that larger shapes get a trial.
        """
        return self.rate() if self.is_timed else 2 * self.rate()

    def rate(self, extra_seconds: float = 0.0) -> float:
        """Return the prompt tokens a second when each such step comes with `extra_seconds` of other work."""
        return self.num_tokens / max(self.seconds + extra_seconds, _ROUNDING)


class Pacing:
    """Chooses the next prefill shape, whether decode goes first, and the steps of a decode launch.

    `shapes` are those of each model.
    """

    def __init__(self, shapes: Sequence[Sequence[PrefillShape]], max_inter_token_latency: float) -> None:
        self._max_inter_token_latency = max_inter_token_latency
        self._prefill_times = [_PrefillTimes(of_model) for of_model in shapes]
        self._decode_times = defaultdict[int, _DecodeTimes](_DecodeTimes)  # by pool
        self._has_read_since_decode = False
        self._decode_due_since = 0.0

    def max_decode_steps(self, decoding: Collection[int], now: float) -> int | None:
        """Return how many steps of each of the pools `decoding` fit before their next tokens are due.

        The time that prefill and partial steps took of this gap is subtracted. None: any number.
        """
        left = self._waiting_since(decoding) + self._max_inter_token_latency - now
        seconds = self._decode_round_seconds(decoding)
        if left > 0.0 and (seconds == 0.0 or left == float("inf")):
            return None
        return max(1, int((left + _ROUNDING) / max(seconds, _ROUNDING)))

    def mark_decode_due(self, now: float) -> None:
        """Start the gap of the next decode step: from now on, live sequences wait for a token."""
        self._decode_due_since = now

    def may_skip(self, pool: int, decoding: Collection[int], now: float, *, prompt_waits: bool) -> bool:
        """Return whether some sequences of a pool may skip its next step.

        Their tokens must still come in time, by the step after it: in time since their own pool's last step,
        whatever other pools do. And it must be much faster without them: a device on which it is not would
        lose their tokens for nothing.

        None may in a gap that prefill used or waits to use: prefill would get less of a longer gap.
        """
        if prompt_waits or self._has_read_since_decode:
            return False
        if self._max_inter_token_latency == float("inf"):
            return False  # no time would be too late
        if any(self._decode_times[other].whole is None for other in decoding):
            return False
        times = self._decode_times[pool]
        due = times.last_whole + self._max_inter_token_latency
        return now + 2 * self._decode_round_seconds(decoding) <= due and times.may_skip()

    def choose_shape(
        self, prompts: Sequence[Prefill], now: float, decoding: Collection[int], *, is_brief: bool = False
    ) -> PrefillShape | None:
        """Return the shape of the next prefill step, or None when decode goes first.

        `decoding` are the indices of the pools that decode. The step reads the first of `prompts`, and as
        many others as the shape has rows; all are of one model. Among plans that are about equally fast, the
        one that reads the most of the first prompt is chosen. With `is_brief`, steps are as short as they can
        be at little cost: a request that arrives during one waits for its end.
        """
        plans: Sequence[_Plan] = self._prefill_times[prompts[0].model].plans(prompts)
        if is_brief:
            plans = _brief(plans)
        if decoding:
            plans = self._plans_before_decode(plans, decoding, now)
        if not plans:
            return None
        # Measured steps scatter by some percent. Without the tolerance, one slow step would exclude its shape
        # for a long time.
        rates = [plan.optimistic_rate for plan in plans]
        min_rate = (1 - _NOISE) * max(rates)
        best, _ = max(
            (rated for rated in zip(plans, rates, strict=True) if rated[1] >= min_rate),
            key=lambda rated: (rated[0].num_first_tokens, rated[0].num_tokens, rated[1]),
        )
        self._has_read_since_decode = True
        return best.shape

    def _plans_before_decode(
        self, plans: Sequence[_Plan], decoding: Collection[int], now: float
    ) -> Sequence[_Plan]:
        """Drop plans that would miss the token deadline, or that read slower than the next gap could."""
        decode_seconds = self._decode_round_seconds(decoding)
        usable_gap = self._max_inter_token_latency - decode_seconds + _ROUNDING
        left = self._waiting_since(decoding) - now + usable_gap
        in_time = [plan for plan in plans if plan.latest_seconds <= left]
        if not self._has_read_since_decode and not self._have_skipped(decoding):
            # Each gap has at least one prefill step. Otherwise a bound that no step meets would stop prefill
            # for ever. A gap in which rows skip steps ends before: no step of all rows is then late.
            return in_time or [min(plans, key=lambda plan: plan.seconds)]
        # A gap has one decode round, so its cost is part of the rate that the next gap could reach.
        next_rate = max(
            (plan.rate(decode_seconds) for plan in plans if plan.latest_seconds <= usable_gap), default=0.0
        )
        return [plan for plan in in_time if plan.rate() >= next_rate]

    def observe(
        self,
        batch: Batch,
        elapsed: float,
        now: float,
        model: int = 0,
        *,
        is_partial: bool = False,
        is_retry: bool = False,
    ) -> None:
        """Update the estimates from a step of `model` that took `elapsed` seconds and ended at `now`.

        `is_partial` says that some of the pool's sequences skipped it. They still wait for their tokens.
        `is_retry` says that its sequence decoded alone after a failure, which is no sign of faster steps.
        """
        if not isinstance(batch, DecodeBatch):
            self._prefill_times[model].observe(batch, elapsed)
            return
        times = self._decode_times[batch.pool]
        seconds_per_step = elapsed / batch.num_steps
        if is_partial:
            times.has_skipped = True
            if not is_retry:
                times.observe_partial(seconds_per_step)
            return
        times.observe_whole(seconds_per_step, batch.num_steps, now)
        self._decode_due_since = now
        self._has_read_since_decode = False

    def _have_skipped(self, decoding: Collection[int]) -> bool:
        """Return whether sequences of these pools have skipped a step since their pool's last whole one."""
        return any(self._decode_times[pool].has_skipped for pool in decoding)

    def _waiting_since(self, decoding: Collection[int]) -> float:
        """Return since when the sequences of these pools wait for a token that wait longest."""
        times = (self._decode_times[pool] for pool in decoding)
        return min([self._decode_due_since, *(each.last_whole for each in times if each.has_skipped)])

    def _decode_round_seconds(self, decoding: Collection[int]) -> float:
        """Return the time of one decode step of each pool: all pools decode before any decodes again."""
        return sum(self._decode_times[pool].whole or 0.0 for pool in decoding)


@dataclass(slots=True)
class _DecodeTimes:
    """Running estimates of one pool's decode steps, in seconds, and when the last one of all sequences was.

    A step of all sequences is a whole one, and one that some skip a partial one. Where partial steps are not
    much faster, one is a trial that costs tokens. So trials become rare while they fail.
    """

    whole: float | None = None
    partial: float | None = None
    last_whole: float = 0.0  # when it ended
    has_skipped: bool = False  # whether a partial step followed
    num_since_partial: int = 0  # whole steps
    distance: int = _FIRST_DISTANCE  # of these, until the next trial

    def observe_whole(self, seconds: float, num_steps: int, now: float) -> None:
        self.whole = _blend(self.whole, seconds)
        self.last_whole = now
        self.has_skipped = False
        self.num_since_partial += num_steps

    def observe_partial(self, seconds: float) -> None:
        is_trial = self.partial is not None and not self._is_faster_without_some()
        self.partial = seconds if is_trial else _blend(self.partial, seconds)  # the estimate before is old
        self.num_since_partial = 0
        if self._is_faster_without_some():
            self.distance = _FIRST_DISTANCE
        elif is_trial:
            self.distance = min(2 * self.distance, _MAX_DISTANCE)

    def may_skip(self) -> bool:
        """Return whether a partial step is much faster than a whole one, or a trial of it is due."""
        return self._is_faster_without_some() or self.num_since_partial >= self.distance

    def _is_faster_without_some(self) -> bool:
        return (self.whole or 0.0) >= _MIN_GAIN * (self.partial or 0.0)


class _PrefillTimes:
    """Running estimates of how long one model's prefill steps take, and of their relative error."""

    def __init__(self, shapes: Sequence[PrefillShape]) -> None:
        self._by_shape = {shape: _ShapeTimes(shape) for shape in shapes}
        self._max_rows = max((shape.num_rows for shape in shapes), default=0)
        self._error = 0.0

    def plans(self, prompts: Sequence[Prefill]) -> list[_Plan]:
        """Return each shape's plan."""
        # Once for all shapes: a simulated replay spends about a third of its time on plans.
        spans = [(prompt.num_computed_tokens, prompt.round_end) for prompt in prompts[: self._max_rows]]
        return [self._plan(times, spans) for times in self._by_shape.values()]

    def observe(self, batch: PrefillBatch, elapsed: float) -> None:
        """Update the estimates from a step that took `elapsed` seconds."""
        times = self._by_shape[batch.shape]
        context = max(row.start + len(row.token_ids) for row in batch.rows)
        expected = times.expected(context)
        if expected is not None:
            error = min(abs(elapsed / expected - 1), _LARGEST_ERROR)
            self._error += _ERROR_SMOOTHING * (error - self._error)
        times.observe(context, elapsed)
        # A larger shape costs no more a token than this one. So a shape whose only step was slow gets another
        # trial.
        for larger in self._by_shape.values():
            upper_bound = elapsed * larger.num_padded / times.num_padded
            if upper_bound > elapsed and (larger.expected(context) or 0.0) > upper_bound:
                larger.observe(context, upper_bound)

    def _plan(self, times: "_ShapeTimes", spans: Sequence[tuple[int, int]]) -> _Plan:
        """Return the plan that reads the first prompts, one for each row of the shape.

        `spans` are where each prompt continues and the furthest that one chunk may end.
        """
        shape = times.shape
        longest = num_tokens = num_first_tokens = 0
        for start, round_end in spans[: shape.num_rows]:
            end = min(start + shape.num_tokens, round_end)
            longest = max(longest, end)
            num_tokens += end - start
            num_first_tokens = num_first_tokens or num_tokens
        timed = times.expected(longest)
        seconds = self._guess(times, longest) if timed is None else timed
        latest = seconds * (1 + _LATE * self._error)
        return _Plan(shape, num_first_tokens, num_tokens, seconds, latest, timed is not None)

    def _guess(self, times: "_ShapeTimes", context: int) -> float:
        """Scale the most similar timed step by the ratio of the shapes' tokens: one of this shape, if any."""
        exponent, _ = _position(context)
        nearest = times.nearest(exponent)
        if nearest is not None:
            return nearest[1]
        # Between equally near ones, that of the most similar size: much of a small step is fixed cost.
        others = (
            (found[0], abs(math.log(ratio)), found[1] * ratio)
            for other in self._by_shape.values()
            if (found := other.nearest(exponent)) is not None
            and (ratio := times.num_padded / other.num_padded)
        )
        return min(others, default=(0, 0.0, times.num_padded * _SECONDS_PER_TOKEN))[2]


class _ShapeTimes:
    """Running estimates of how many seconds one shape's steps take, by the context's binary logarithm."""

    def __init__(self, shape: PrefillShape) -> None:
        self.shape = shape
        self.num_padded = shape.num_rows * shape.num_tokens
        self._seconds: dict[int, float] = {}

    def expected(self, context: int) -> float | None:
        """Return the seconds of a step, or None if no such step was timed."""
        exponent, share = _position(context)
        below, above = self._seconds.get(exponent), self._seconds.get(exponent + 1)
        return None if below is None or above is None else (1 - share) * below + share * above

    def nearest(self, exponent: int) -> tuple[int, float] | None:
        """Return how far the nearest estimate is, in powers of two, and its seconds; None without any."""
        if not self._seconds:
            return None
        nearest = min(self._seconds, key=lambda timed: abs(timed - exponent))
        return abs(nearest - exponent), self._seconds[nearest]

    def observe(self, context: int, seconds: float) -> None:
        """Move the estimates of the two powers of two around `context` toward `seconds`.

        They change in proportion, and so stay positive. A new one continues the line through the two before.
        """
        below, share = _position(context)
        above = below + 1
        seconds = max(seconds, _ROUNDING)
        expected = self.expected(context)
        if expected is None:
            # What is known was extrapolated, perhaps from an outlier.
            start = self._seconds[below] = min(self._seconds.get(below, seconds), seconds)
            rise = start - self._seconds.get(below - 1, start)
            end = self._seconds.setdefault(above, max(seconds, start + 2 * rise))
            expected = (1 - share) * start + share * end
        error = min(seconds / expected - 1, _LARGEST_ERROR)
        self._seconds[below] *= 1 + _SMOOTHING * (1 - share) * error
        self._seconds[above] *= 1 + _SMOOTHING * share * error


def _brief(plans: Sequence[_Plan]) -> list[_Plan]:
    """Return the shortest plan that is not much slower than the fastest, and those that are shorter yet."""
    min_rate = (1 - _BRIEF_COST) * max(plan.optimistic_rate for plan in plans)
    longest = min(plan.seconds for plan in plans if plan.optimistic_rate >= min_rate)
    return [plan for plan in plans if plan.seconds <= longest]


def _blend(estimate: float | None, seconds: float) -> float:
    return seconds if estimate is None else estimate + _SMOOTHING * (seconds - estimate)


def _position(context: int) -> tuple[int, float]:
    """Return the exponent of the power of two below a context, and how far it is to the next, in [0, 1)."""
    exponent = context.bit_length() - 1
    return exponent, context / 2**exponent - 1
