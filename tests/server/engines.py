"""Engines in real threads over the fake backend, which a gate can hold, with a record of what they report."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from backends.clock import Clock, WallClock
from backends.fake import FakeBackend, fake_spec
from backends.interface import Backend, BackendError, BackendSpec, Batch, SamplingParams
from scheduler.admission import admit
from scheduler.config import SchedulerConfig
from scheduler.messages import Add, EngineOutput, Final, StopCriteria
from scheduler.stats import StepRecord
from server.engine.async_engine import AsyncEngine, EngineObserver
from server.engine.client import EngineClient

GREEDY = SamplingParams(temperature=0.0)
_ids = itertools.count()


class Gate:
    """Each step takes one pass; a gate that is open lets all go through."""

    def __init__(self, *, is_open: bool = True) -> None:
        self._passes = threading.Semaphore(0)
        self._is_open = is_open
        self.arrived = threading.Semaphore(0)

    def step(self, _: Batch) -> float:
        self.arrived.release()
        if not self._is_open:
            assert self._passes.acquire(timeout=30), "a test left the gate shut"
        return 0.0

    def let(self, num_steps: int) -> None:
        self._passes.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._passes.release()

    async def wait_for_step(self) -> None:
        """Wait until a new step waits at the gate."""
        assert await asyncio.to_thread(self.arrived.acquire, timeout=30), "no step came"


@dataclass
class Observations:
    """The events that an observer received."""

    num_refused: int = 0
    num_generated: int = 0
    prompts: list[Add] = field(default_factory=list)
    gaps: list[float | None] = field(default_factory=list)
    finals: dict[tuple[str, int], Final] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    last: StepRecord | None = None

    def loaded(self, spec: BackendSpec) -> None: ...

    def refused(self) -> None:
        self.num_refused += 1

    def stepped(self, record: StepRecord) -> None:
        self.last = record
        self.news.set()

    def read_prompt(self, add: Add) -> None:
        self.prompts.append(add)

    def got_tokens(self, _add: Add, /, since_arrival: float, since_last: float | None) -> None:
        assert since_arrival >= (since_last or 0)
        self.gaps.append(since_last)

    def generated(self, num_tokens: int) -> None:
        assert num_tokens >= 0
        self.num_generated += num_tokens

    def finished(self, add: Add, choice: int, final: Final) -> None:
        assert (add.request_id, choice) not in self.finals, "two finals"
        self.finals[add.request_id, choice] = final
        self.news.set()

    async def wait_until(self, condition: Callable[["Observations"], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition(self):
                self.news.clear()
                await self.news.wait()


def is_at_rest(seen: Observations) -> bool:
    """Whether no slot is held any more."""
    return (
        seen.last is not None and seen.last.stats.num_slots_in_use == 0 and seen.last.stats.num_waiting == 0
    )


async def generate(engine: EngineClient, add: Add) -> AsyncGenerator[EngineOutput, None]:
    """Yield a request's outputs up to every choice's final one; closed early, abandon the request."""
    queue: asyncio.Queue[EngineOutput] = asyncio.Queue()
    engine.submit(admit(add, engine.spec), queue.put_nowait)
    num_open = add.num_choices
    try:
        while num_open:
            output = await queue.get()
            num_open -= output.final is not None
            yield output
    finally:
        engine.abandon(add.request_id)


def add_of(
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 8,
    *,
    sampling: SamplingParams = GREEDY,
    num_choices: int = 1,
    stop_token_ids: frozenset[int] = frozenset(),
    now: float = 0.0,
    num_prompt_logprobs: int | None = None,
    min_tokens: int = 0,
) -> Add:
    return Add(
        f"request-{next(_ids)}",
        tuple(prompt),
        sampling,
        StopCriteria(max_tokens, min_tokens, stop_token_ids),
        arrival_time=now,
        num_choices=num_choices,
        num_prompt_logprobs=num_prompt_logprobs,
    )


@asynccontextmanager
async def running(
    observer: EngineObserver,
    *,
    gate: Gate | None = None,
    spec: BackendSpec | None = None,
    faults: Mapping[int, BackendError] | None = None,
    max_num_waiting: int = 64,
    max_decode_steps: int = 1,
    clock: Clock | None = None,
    config: SchedulerConfig | None = None,
) -> AsyncIterator[AsyncEngine]:
    """Run an engine that is ready."""
    gate, clock = gate or Gate(), clock or WallClock()

    def load() -> Backend:
        return FakeBackend(spec or fake_spec(), step_time=gate.step, faults=faults, clock=clock)

    config = config or SchedulerConfig(max_num_waiting=max_num_waiting, max_decode_steps=max_decode_steps)
    engine = AsyncEngine(load, config, observer, clock, stall_limit=10.0)
    engine.start()
    health = await engine.wait_loaded()
    assert health.is_ready, health
    try:
        yield engine
    finally:
        gate.open()
        await engine.close()
