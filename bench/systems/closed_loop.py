"""A closed loop around an engine, in its thread: the next request replaces each one that ends."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from backends.clock import Clock
from backends.interface import Backend, BackendSpec, SamplingParams
from commands.loadtest.answer import Answer, Failure
from commands.loadtest.prompts import Prompt
from commands.loadtest.run import Run
from commands.loadtest.target import Outcome
from scheduler.admission import RefusedError, admit
from scheduler.config import SchedulerConfig
from scheduler.engine import EngineCore
from scheduler.messages import Add, EngineInput, EngineOutput, Final, FinishReason, Shutdown, StopCriteria
from scheduler.scheduler import Scheduler
from scheduler.stats import StepRecord

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Sent:
    """A request in flight: when it was sent, and when its tokens arrived."""

    moment: float
    contents: list[float] = field(default_factory=list)

    def outcome(self, final: Final, now: float) -> Outcome:
        if final.reason is FinishReason.LENGTH:
            return Answer(
                self.moment, tuple(self.contents), now, final.num_prompt_tokens, final.num_output_tokens
            )
        return Failure(final.reason.value, final.message or "")


class ClosedLoop:
    """Keeps `max_concurrency` requests in flight. Shuts the engine down when all prompts have outcomes."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        max_concurrency: int,
        inbox: "SimpleQueue[EngineInput]",
        clock: Clock,
        spec: BackendSpec,
    ) -> None:
        self._prompts = prompts
        self._spec = spec
        self._inbox = inbox
        self._clock = clock
        self._num_sent = 0
        self._open: dict[str, Sent] = {}
        self.outcomes: dict[int, Outcome] = {}
        while self._num_sent < min(max_concurrency, len(prompts)):
            self._send()

    def deliver(self, outputs: list[EngineOutput], _record: StepRecord) -> None:
        """Process the outputs of an engine step."""
        now = time.perf_counter()
        for output in outputs:
            sent = self._open[output.request_id]
            if output.tokens:
                sent.contents.append(now)
            if output.final is not None:
                del self._open[output.request_id]
                self.outcomes[int(output.request_id)] = sent.outcome(output.final, now)
                self._send_next_or_stop()

    def _send_next_or_stop(self) -> None:
        if self._num_sent < len(self._prompts):
            self._send()
        elif not self._open:
            self._inbox.put(Shutdown())

    def _send(self) -> None:
        """Send the next prompt. Without stop ids, its answer has full length."""
        prompt = self._prompts[self._num_sent]
        name = str(self._num_sent)
        assert not isinstance(prompt.content, str), "expected a prompt of token ids, got text"
        self._num_sent += 1
        add = Add(name, prompt.content, GREEDY, StopCriteria(prompt.max_tokens), self._clock.now())
        try:
            admitted = admit(add, self._spec)
        except RefusedError as error:
            self.outcomes[int(name)] = Failure("rejected", str(error))
            self._send_next_or_stop()
            return
        self._open[name] = Sent(time.perf_counter())
        self._inbox.put(admitted)


def run_engine(
    backend: Backend,
    config: SchedulerConfig,
    clock: Clock,
    prompts: Sequence[Prompt],
    max_concurrency: int | None,
) -> Run:
    """Run an engine until all prompts have outcomes."""
    inbox: SimpleQueue[EngineInput] = SimpleQueue()
    core = EngineCore(
        Scheduler(backend.spec, config, clock, archive=backend.prefix_archive), backend, clock, inbox
    )
    start = time.perf_counter()
    loop = ClosedLoop(prompts, max_concurrency or len(prompts), inbox, clock, backend.spec)
    core.run(loop.deliver)
    if core.error is not None:
        raise core.error
    return Run(tuple(loop.outcomes[index] for index in range(len(prompts))), time.perf_counter() - start)
