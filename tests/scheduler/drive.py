"""Helpers of scheduler tests: short forms of requests, and an engine on a virtual clock."""

from collections.abc import Callable, Mapping
from queue import SimpleQueue

from backends.clock import VirtualClock
from backends.fake import FakeBackend
from backends.fake_model import expected_tokens
from backends.interface import Backend, BackendError, BackendSpec, Batch, PromptPooling, SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.constraints import Constraints
from scheduler.engine import EngineCore
from scheduler.messages import Add, AdmittedAdd, EngineInput, EngineOutput, Final, StopCriteria
from scheduler.scheduler import Scheduler
from scheduler.stats import BatchRecord

GREEDY = SamplingParams(temperature=0.0)
Key = tuple[str, int]  # request and choice


def request(
    request_id: str,
    num_prompt_tokens: int = 10,
    max_tokens: int = 5,
    *,
    num_choices: int = 1,
    sampling: SamplingParams = GREEDY,
    min_tokens: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
    arrival_time: float = 0.0,
    priority: int = 0,
    queue_timeout: float | None = None,
    timeout: float | None = None,
    num_prompt_logprobs: int | None = None,
    num_prefill_tokens: int | None = None,
    grammar: str | None = None,
    is_background: bool = False,
    tenant: str = "",
    prompt_token_ids: tuple[int, ...] | None = None,
    pooling: PromptPooling | None = None,
    cache_salt: str = "",
    prediction_token_ids: tuple[int, ...] = (),
) -> AdmittedAdd:
    """Return an admitted request. Its prompt depends on its id, so mixed-up sequences are detected."""
    base = sum(map(ord, request_id))
    add = Add(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids
        or tuple((base + 7 * index) % 500 for index in range(num_prompt_tokens)),
        sampling=sampling,
        stop=StopCriteria(max_tokens, min_tokens, stop_token_ids),
        arrival_time=arrival_time,
        num_choices=num_choices,
        priority=priority,
        queue_timeout=queue_timeout,
        timeout=timeout,
        num_prompt_logprobs=num_prompt_logprobs,
        num_prefill_tokens=num_prefill_tokens,
        grammar=grammar,
        is_background=is_background,
        tenant=tenant,
        pooling=pooling,
        cache_salt=cache_salt,
        prediction_token_ids=prediction_token_ids,
    )
    return AdmittedAdd(add)


def answer(add: Add, spec: BackendSpec, choice: int = 0) -> list[int]:
    """The tokens that a sequence should deliver when nothing but its stop criteria ends it."""
    stop = add.stop
    tokens = expected_tokens(
        add.prompt_token_ids,
        add.sampling,
        stop.max_tokens,
        vocab_size=spec.vocab_size,
        choice=choice,
        min_tokens=stop.min_tokens,
        stop_token_ids=stop.stop_token_ids,
    )
    for index, token in enumerate(tokens):
        if index >= stop.min_tokens and token in stop.stop_token_ids:
            return tokens[:index]
    return tokens


def no_time(_batch: Batch) -> float:
    return 0.0


class Drive:
    """An engine over the fake backend, with everything it said.

    Each turn checks that no slot or scratch is lost.
    """

    def __init__(
        self,
        spec: BackendSpec | None = None,
        config: SchedulerConfig | None = None,
        *,
        backend: Backend | None = None,
        step_time: Callable[[Batch], float] = no_time,
        faults: Mapping[int, BackendError] | None = None,
        constraints: Constraints | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.backend: Backend = backend or FakeBackend(
            spec, clock=self.clock, step_time=step_time, faults=faults
        )
        self.spec = self.backend.spec
        self.scheduler = Scheduler(
            self.spec,
            config if config is not None else SchedulerConfig(),
            self.clock,
            constraints,
            self.backend.prefix_archive,
        )
        self.inbox: SimpleQueue[EngineInput] = SimpleQueue()
        self.core = EngineCore(self.scheduler, self.backend, self.clock, self.inbox)
        self.outputs: dict[Key, list[EngineOutput]] = {}
        self.token_times: dict[Key, list[float]] = {}
        self.batches: list[BatchRecord] = []
        self.num_failed = 0  # steps

    def send(self, *messages: EngineInput) -> None:
        for message in messages:
            self.inbox.put(message)

    def step(self) -> None:
        """Take one turn, if there is anything to do."""
        if self.inbox.empty() and not self.scheduler.has_work:
            return
        record = self.core.step()
        self.num_failed += record.has_failed
        if record.batch is not None:
            self.batches.append(record.batch)
        for output in self.scheduler.take_outputs():
            key = (output.request_id, output.choice)
            self.outputs.setdefault(key, []).append(output)
            if output.tokens:
                self.token_times.setdefault(key, []).append(self.clock.now())
        self.scheduler.check_integrity()

    def run(self, *messages: EngineInput, max_steps: int = 10_000) -> None:
        """Send the messages and go on until everything has ended."""
        self.send(*messages)
        for _ in range(max_steps):
            if self.inbox.empty() and not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} turns: {self.scheduler.stats()}")

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return [token.token_id for output in self.outputs[request_id, choice] for token in output.tokens]

    def final(self, request_id: str, choice: int = 0) -> Final:
        """The one final output, which is the last."""
        *news, last = self.outputs[request_id, choice]
        assert last.final is not None
        assert all(output.final is None for output in news)
        return last.final
