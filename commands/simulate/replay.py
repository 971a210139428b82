"""A trace of arrivals through the real scheduler, on the virtual clock.

The scheduler is driven as the engine drives it; a cost model replaces the device. Runs of identical decode
steps may be collapsed into one launch. The scheduler returns the same batch until an answer ends or an
arrival finds a free slot. So most steps change nothing but counts, which `CountingScheduler` keeps.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from backends.clock import VirtualClock
from backends.config import prefill_shapes
from backends.fake import slot_pool
from backends.interface import (
    BackendSpec,
    Batch,
    BatchResult,
    DecodeBatch,
    Feature,
    PrefillBatch,
    PrefixSpec,
    SampledToken,
    SamplingParams,
    ScratchSpec,
)
from backends.timed import CostModel, SimulatedStore
from cache.policy import CachePolicy
from cache.scratch import ScratchLayout
from commands.simulate.arrivals import HASH_TOKENS, Arrival
from commands.simulate.drafting import IMPORTANCE, Drafting
from commands.simulate.options import PREFILL_CHUNK
from scheduler.admission import max_output_tokens
from scheduler.config import SchedulerConfig
from scheduler.counting import CountingScheduler
from scheduler.messages import Add, AdmittedAdd, Final, FinishReason, StopCriteria
from scheduler.scheduler import Scheduler
from scheduler.waiting import QueueOrder

_TOKEN = SampledToken(0)
_GREEDY = SamplingParams(temperature=0.0)
_UNBOUNDED = 10**9
_LATENCY = SchedulerConfig().max_inter_token_latency


def replay_spec(
    num_slots: int,
    policy: CachePolicy,
    max_model_len: int,
    prefixes: PrefixSpec | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> BackendSpec:
    """Return the spec of a simulated machine: one pool, two scratch slots, one prompt per prefill batch.

    Its prefill shapes are those of the server that have one row: the machine reads row after row.
    """
    # No trace says which prompts continue an answer, so no slot is held to be good for storing one.
    pool = replace(slot_pool(num_slots, policy, max_model_len), max_exact_tokens=0)
    return BackendSpec(
        vocab_size=2**63 - 1,
        max_model_len=max_model_len,
        pools=(pool,),
        scratch=ScratchSpec(2, ScratchLayout(max_model_len)),
        prefill_shapes=tuple(
            shape for shape in prefill_shapes(prefill_chunk, max_model_len) if shape.num_rows == 1
        ),
        features=frozenset(Feature),
        simulated=True,
        prefixes=prefixes,
    )


def replay_config(max_inter_token_latency: float) -> SchedulerConfig:
    """Return the scheduler's options of a replay: one tenant, whose queue is not bounded."""
    return SchedulerConfig(
        max_num_waiting=_UNBOUNDED, order=QueueOrder.FCFS, max_inter_token_latency=max_inter_token_latency
    )


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
    num_prompt_tokens: int = 0  # that the model was given
    num_removed_tokens: int = 0  # that drafts took from prompts before
    num_restored_tokens: int = 0  # of `num_prompt_tokens`, those that were copied from earlier prompts
    num_output_tokens: int = 0
    num_refused: int = 0
    num_steps: int = 0  # of the device; collapsed steps count one by one
    num_launches: int = 0
    busy_seconds: float = 0.0  # of the device
    decode_seconds: float = 0.0
    slot_seconds: float = 0.0  # slots in use, integrated over time
    num_switches: int = 0  # between models
    switch_seconds: float = 0.0
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
        self.num_restored_tokens += final.num_cached_tokens
        self.num_output_tokens += final.num_output_tokens


class Replay:
    """Plays arrivals against the slots of a spec; `cost_model` gives the seconds of a batch.

    `store` is the memory of the spec's stored blocks, and gives the seconds of copying them. With
    `drafting`, the spec has its draft, which reads the prompts that it shortens first.

    `collapses` joins runs of decode steps of the same rows into one launch, whose tokens are only counted.
    Results are the same without it where a step's time does not depend on its sequences' lengths. With
    `skips_prefill`, other nodes read the prompts, and an arrival is the end of that.

    Replays of models that take turns on a machine share a `clock` and a `record`.
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
        store: SimulatedStore | None = None,
        drafting: Drafting | None = None,
        clock: VirtualClock | None = None,
        record: ReplayRecord | None = None,
    ) -> None:
        self._spec = spec
        self._cost_model = cost_model
        self._skips_prefill = skips_prefill
        self._store = store
        self._drafting = drafting
        self._drafted: dict[str, Add] = {}  # by their draft's request id: requests whose draft reads
        self._clock = clock if clock is not None else VirtualClock()
        config = config if config is not None else replay_config(_LATENCY)
        # One step per launch: `_collapse` chooses the number of steps itself.
        config = replace(config, max_decode_steps=1)
        self._counting = CountingScheduler(spec, config, self._clock) if collapses else None
        self._scheduler = self._counting or Scheduler(spec, config, self._clock)
        self._sample_interval = sample_interval
        self._next_sample = 0.0
        self._prompt = (0,) * spec.max_model_len
        self._seconds_elsewhere: dict[str, float] = {}
        self._record = record if record is not None else ReplayRecord()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def has_room(self) -> bool:
        """Whether a further request would get a slot at once."""
        under_way = self._scheduler.num_waiting + self._scheduler.num_slots_in_use
        return under_way < self._spec.pools[0].num_slots

    def run(self, arrivals: Iterable[Arrival]) -> ReplayRecord:
        """Play until all requests have ended, and return the record."""
        numbered = enumerate(arrivals)
        upcoming = next(numbered, None)
        while upcoming is not None or self.has_work:
            if upcoming is not None and not self.has_work:
                self._clock.elapse(max(0.0, upcoming[1].time - self._clock.now()))
            while upcoming is not None and upcoming[1].time <= self._clock.now():
                self.add(*upcoming)
                upcoming = next(numbered, None)
            self.step(upcoming[1].time if upcoming is not None else math.inf)
        self._record.seconds = self._clock.now()
        return self._record

    def add(self, index: int, arrival: Arrival) -> None:
        """Queue the request of an arrival, whose number is `index`."""
        if arrival.seconds_elsewhere:
            self._seconds_elsewhere[str(index)] = arrival.seconds_elsewhere
        prompt = self._token_ids(arrival)
        stop = StopCriteria(max_tokens=arrival.num_output_tokens)
        salt = "" if arrival.hash_ids else str(index)
        self._add(Add(str(index), prompt, _GREEDY, stop, arrival.time, cache_salt=salt))

    def step(self, next_arrival: float) -> None:
        """Take one step, or several decode steps at once, and record what has ended."""
        self._step(next_arrival)
        self._take_outputs()

    def _add(self, add: Add) -> None:
        # Only its lengths can be refused. `admit` would look at every token of the prompt, which is ours.
        room = max_output_tokens(len(add.prompt_token_ids), 0, self._spec, add.pool)
        if add.stop.max_tokens > room:
            self._record.num_refused += 1
            return
        admitted = AdmittedAdd(add)
        num_read = len(add.prompt_token_ids)
        if self._drafting is not None:
            num_read = self._drafting.num_read(num_read)
        if num_read < len(add.prompt_token_ids):
            admitted = AdmittedAdd(self._draft_add(add, num_read))
        self._scheduler.add(admitted)

    def _draft_add(self, add: Add, num_read: int) -> Add:
        """Return the request to the draft, which the one with the tokens that it keeps will follow."""
        request_id = f"{add.request_id} draft"
        # What is kept of a prompt is no beginning of another one.
        kept = replace(add, prompt_token_ids=self._prompt[:num_read], cache_salt=add.request_id)
        self._drafted[request_id] = kept
        self._record.num_removed_tokens += len(add.prompt_token_ids) - num_read
        stop = StopCriteria(max_tokens=0)
        pool = len(self._spec.pools)
        return replace(add, request_id=request_id, stop=stop, pool=pool, importance=IMPORTANCE)

    def _token_ids(self, arrival: Arrival) -> tuple[int, ...]:
        size = arrival.num_prompt_tokens
        if size > len(self._prompt):
            return (*self._prompt, 0)  # one token too long, so that admission refuses it
        if not arrival.hash_ids:
            return self._prompt[:size]
        # Tokens behind the last complete block belong to no block that could be stored.
        blocks = [(hash_id + 1,) * HASH_TOKENS for hash_id in arrival.block_ids]
        return (*itertools.chain.from_iterable(blocks), *((0,) * (size % HASH_TOKENS)))

    def _step(self, next_arrival: float) -> None:
        batch = self._scheduler.schedule()
        if batch is None:
            return
        if self._counting is not None and isinstance(batch, DecodeBatch) and not self._counting.is_reading:
            batch = self._collapse(batch, self._counting.num_steps_left, next_arrival)
        is_elsewhere = self._skips_prefill and isinstance(batch, PrefillBatch)
        seconds = 0.0 if is_elsewhere else self._cost_model.seconds(batch)
        if self._store is not None:
            seconds += self._store.restore_time(batch) + self._store.store_time(batch)
        self._count(batch, seconds)
        self._clock.elapse(seconds)
        # No one looks at the importance that a draft returns.
        result = BatchResult(self._tokens(batch), seconds, importance=((),) * len(batch.rows))
        self._scheduler.update(batch, result)

    def _tokens(self, batch: Batch) -> tuple[tuple[SampledToken, ...], ...]:
        if isinstance(batch, PrefillBatch):
            return tuple((_TOKEN,) * len(row.draws) for row in batch.rows)
        return () if self._counting is not None else ((_TOKEN,),) * len(batch.rows)

    def _collapse(self, batch: DecodeBatch, num_steps: int, next_arrival: float) -> DecodeBatch:
        """Return the batch with the number of steps after which the scheduler would return another batch.

        That is when an answer ends, after `num_steps`, or when an arrival finds a free slot. A draft needs
        none.
        """
        has_room = self._scheduler.num_slots_in_use < self._spec.pools[0].num_slots
        if has_room or self._drafting is not None:
            wait_steps = (next_arrival - self._clock.now()) / self._cost_model.seconds(batch)
            if wait_steps < num_steps:  # false for infinity too, which `ceil` cannot take
                num_steps = math.ceil(wait_steps)
        return DecodeBatch(batch.rows, num_steps, batch.pool)

    def _count(self, batch: Batch, seconds: float) -> None:
        record = self._record
        now = self._clock.now()
        record.num_launches += 1
        record.busy_seconds += seconds
        record.decode_seconds += seconds if isinstance(batch, DecodeBatch) else 0.0
        record.num_steps += batch.num_steps if isinstance(batch, DecodeBatch) else 1
        num_waiting, num_in_use = self._scheduler.num_waiting, self._scheduler.num_slots_in_use
        record.slot_seconds += num_in_use * seconds
        while self._next_sample <= now:
            record.samples.append(Sample(self._next_sample, num_waiting, num_in_use))
            self._next_sample += self._sample_interval

    def _take_outputs(self) -> None:
        for output in self._scheduler.take_outputs():
            if output.final is None:
                continue
            kept = self._drafted.pop(output.request_id, None)
            if kept is not None:
                self._scheduler.add(AdmittedAdd(replace(kept, turn=output.final.turn)))
            else:
                self._record.add(output.final, self._seconds_elsewhere.pop(output.request_id, 0.0))
