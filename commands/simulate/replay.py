"""A trace of arrivals through the real scheduler, on the virtual clock.

The scheduler is driven as the engine drives it; a cost model replaces the device. Runs of identical decode
steps may be collapsed into one launch. The scheduler returns the same batch until an answer ends or an
arrival finds a free slot.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from backends.clock import VirtualClock
from backends.interface import (
    BackendSpec,
    Batch,
    BatchResult,
    DecodeBatch,
    Feature,
    PrefillBatch,
    PrefillShape,
    SampledToken,
    SamplingParams,
    ScratchSpec,
    SlotPoolSpec,
)
from backends.timed import CostModel
from cache.policy import CachePolicy
from cache.scratch import ScratchLayout
from commands.simulate.arrivals import Arrival
from scheduler.admission import RefusedError, admit
from scheduler.config import SchedulerConfig
from scheduler.messages import Add, Final, FinishReason, StopCriteria
from scheduler.scheduler import Scheduler
from scheduler.stats import SchedulerStats

_TOKEN = SampledToken(0)
_GREEDY = SamplingParams(temperature=0.0)
_UNBOUNDED = 10**9
_LATENCY = SchedulerConfig().max_inter_token_latency


def replay_spec(num_slots: int, policy: CachePolicy, max_model_len: int) -> BackendSpec:
    """Return the spec of a simulated machine: one pool, two scratch slots, one prompt per prefill batch."""
    shapes = (256, 1024, 4096, 16384)
    return BackendSpec(
        vocab_size=1,
        max_model_len=max_model_len,
        pools=(SlotPoolSpec(num_slots, policy, policy.max_exact_prompt, max_model_len, policy.name),),
        scratch=ScratchSpec(2, ScratchLayout(max_model_len)),
        prefill_shapes=tuple(
            PrefillShape(1, size) for size in shapes if size <= max(max_model_len, shapes[0])
        ),
        features=frozenset(Feature),
        simulated=True,
    )


def replay_config(max_inter_token_latency: float) -> SchedulerConfig:
    """Return the scheduler's options of a replay: its queue is not bounded."""
    return SchedulerConfig(max_num_waiting=_UNBOUNDED, max_inter_token_latency=max_inter_token_latency)


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of the scheduler at one time."""

    time: float
    num_waiting: int
    num_slots_in_use: int


@dataclass(slots=True)
class ReplayRecord:
    """The results of a replay.

    Lists are in the order in which requests end; all times are simulated seconds.
    """

    time_to_first_token: list[float] = field(default_factory=list)
    time_per_output_token: list[float] = field(default_factory=list)
    end_to_end: list[float] = field(default_factory=list)
    queue_time: list[float] = field(default_factory=list)
    end_times: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_refused: int = 0
    num_steps: int = 0  # of the device; collapsed steps count one by one
    num_launches: int = 0
    busy_seconds: float = 0.0  # of the device
    decode_seconds: float = 0.0
    slot_seconds: float = 0.0  # slots in use, integrated over time
    seconds: float = 0.0

    def by_request(self) -> Iterator[tuple[float, float, float]]:
        """Yield the time to the first token, per further token, and end to end of each request."""
        answers = iter(self.time_per_output_token)
        for first, whole in zip(self.time_to_first_token, self.end_to_end, strict=True):
            yield first, next(answers) if whole > first else 0.0, whole

    def add(self, final: Final, seconds_elsewhere: float = 0.0) -> None:
        """Record the end of a request, whose prompt took `seconds_elsewhere` before it arrived here."""
        timing = final.timing
        if final.reason is not FinishReason.LENGTH or timing.admitted is None or timing.first_token is None:
            self.num_refused += 1
            return
        self.end_times.append(timing.finished)
        self.end_to_end.append(timing.finished - timing.arrival + seconds_elsewhere)
        self.queue_time.append(timing.admitted - timing.arrival)
        self.time_to_first_token.append(timing.first_token - timing.arrival + seconds_elsewhere)
        if final.num_output_tokens > 1:
            self.time_per_output_token.append(
                (timing.finished - timing.first_token) / (final.num_output_tokens - 1)
            )
        self.num_prompt_tokens += final.num_prompt_tokens
        self.num_output_tokens += final.num_output_tokens


class Replay:
    """Plays arrivals against the slots of a spec; `cost_model` gives the seconds of a batch.

    `collapses` joins runs of decode steps of the same rows into one launch. Results are the same without it
    where a step's time does not depend on its sequences' lengths. With `skips_prefill`, other nodes read the
    prompts, and an arrival is the end of that.
    """

    def __init__(
        self,
        spec: BackendSpec,
        cost_model: CostModel,
        config: SchedulerConfig | None = None,
        *,
        collapses: bool = True,
        sample_interval: float = 60.0,
        skips_prefill: bool = False,
    ) -> None:
        self._spec = spec
        self._cost_model = cost_model
        self._collapses = collapses
        self._skips_prefill = skips_prefill
        self._clock = VirtualClock()
        config = config if config is not None else replay_config(_LATENCY)
        # One step per launch: `_collapse` chooses the number of steps itself.
        self._scheduler = Scheduler(spec, replace(config, max_decode_steps=1), self._clock)
        self._sample_interval = sample_interval
        self._next_sample = 0.0
        self._prompt = (0,) * spec.max_model_len
        self._num_output_tokens: dict[str, int] = {}  # of the requests that have not ended
        self._seconds_elsewhere: dict[str, float] = {}
        self._record = ReplayRecord()

    def run(self, arrivals: Iterable[Arrival]) -> ReplayRecord:
        """Play until all requests have ended, and return the record."""
        adds = self._adds(arrivals)
        upcoming = next(adds, None)
        while upcoming is not None or self._scheduler.has_work:
            if upcoming is not None and not self._scheduler.has_work:
                self._clock.elapse(max(0.0, upcoming.arrival_time - self._clock.now()))
            while upcoming is not None and upcoming.arrival_time <= self._clock.now():
                self._add(upcoming)
                upcoming = next(adds, None)
            self._step(upcoming.arrival_time if upcoming is not None else math.inf)
            self._take_outputs()
        self._record.seconds = self._clock.now()
        return self._record

    def _add(self, add: Add) -> None:
        try:
            self._scheduler.add(admit(add, self._spec))
        except RefusedError:
            self._record.num_refused += 1
        else:
            self._num_output_tokens[add.request_id] = add.stop.max_tokens

    def _adds(self, arrivals: Iterable[Arrival]) -> Iterator[Add]:
        for index, arrival in enumerate(arrivals):
            prompt = self._prompt[: arrival.num_prompt_tokens]
            # A prompt longer than `max_model_len` keeps its length, so that admission refuses it.
            prompt += (0,) * (arrival.num_prompt_tokens - len(prompt))
            if arrival.seconds_elsewhere:
                self._seconds_elsewhere[str(index)] = arrival.seconds_elsewhere
            stop = StopCriteria(max_tokens=arrival.num_output_tokens)
            yield Add(str(index), prompt, _GREEDY, stop, arrival.time)

    def _step(self, next_arrival: float) -> None:
        batch = self._scheduler.schedule()
        if batch is None:
            return
        stats = self._scheduler.stats()
        if self._collapses and isinstance(batch, DecodeBatch) and not stats.num_unread_prompt_tokens:
            batch = self._collapse(batch, stats, next_arrival)
        is_elsewhere = self._skips_prefill and isinstance(batch, PrefillBatch)
        seconds = 0.0 if is_elsewhere else self._cost_model.seconds(batch)
        self._count(batch, stats, seconds)
        self._clock.elapse(seconds)
        self._scheduler.update(batch, BatchResult(_tokens(batch), seconds))

    def _collapse(self, batch: DecodeBatch, stats: SchedulerStats, next_arrival: float) -> DecodeBatch:
        """Return the batch with the number of steps after which the scheduler would return another batch.

        That is when an answer ends, or when an arrival finds a free slot.
        """
        num_steps = min(self._num_output_tokens[row.request_id] - row.draw.output_index for row in batch.rows)
        if stats.num_slots_in_use < self._spec.pools[0].num_slots:
            wait_steps = (next_arrival - self._clock.now()) / self._cost_model.seconds(batch)
            if wait_steps < num_steps:  # false for infinity too, which `ceil` cannot take
                num_steps = math.ceil(wait_steps)
        return replace(batch, num_steps=num_steps)

    def _count(self, batch: Batch, stats: SchedulerStats, seconds: float) -> None:
        record = self._record
        now = self._clock.now()
        record.num_launches += 1
        record.busy_seconds += seconds
        record.decode_seconds += seconds if isinstance(batch, DecodeBatch) else 0.0
        record.num_steps += batch.num_steps if isinstance(batch, DecodeBatch) else 1
        record.slot_seconds += stats.num_slots_in_use * seconds
        while self._next_sample <= now:
            record.samples.append(Sample(self._next_sample, stats.num_waiting, stats.num_slots_in_use))
            self._next_sample += self._sample_interval

    def _take_outputs(self) -> None:
        for output in self._scheduler.take_outputs():
            if output.final is not None:
                del self._num_output_tokens[output.request_id]
                self._record.add(output.final, self._seconds_elsewhere.pop(output.request_id, 0.0))


def _tokens(batch: Batch) -> tuple[tuple[SampledToken, ...], ...]:
    if isinstance(batch, PrefillBatch):
        return tuple((_TOKEN,) * len(row.draws) for row in batch.rows)
    return ((_TOKEN,) * batch.num_steps,) * len(batch.rows)
