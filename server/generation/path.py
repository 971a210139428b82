"""The path of every request to the engine: streamed, whole, in the background, in a batch, or an embedding.

    reserve -> Reserved -> prepare -> Prepared -> submit -> Submitted -> accept -> Accepted -> events

Each step returns the input of the next one. A ticket is held before any work is done, and it is released on
every exit. Nothing is sent before the engine has accepted the request. Leaving `submit` abandons unfinished
requests.
"""

import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request

from backends.interface import Feature
from scheduler.messages import AdmittedAdd
from server.engine.client import Ticket
from server.generation.admission import (
    CACHE_POLICY_HEADER,
    POOL_HEADER,
    RequestContext,
    check_limits,
    engine_requests,
    prompt_too_long,
    requested_pool,
)
from server.generation.decoder import Decoder, TextOptions
from server.generation.drafted_queue import DraftedQueue
from server.generation.event_queue import EventQueue
from server.generation.events import ChoiceDelta, Drafted, Event
from server.generation.speculative_prefill import HEADER, Drafting, Outcome, Skipped, drafting
from server.generation.tally import Tally
from server.generation.task import Rendered, Task
from server.grammar.structure import Structure, StructureError, StructureKind
from server.http.disconnect import unless_disconnected
from server.http.errors import invalid_value
from server.http.ignored import ignore
from server.http.rate_limits import DEFAULT_MAX_TOKENS
from server.http.record import RequestRecord, tenant
from server.logs import fields
from server.options.settings import PrefixSharing
from server.protocol.generation import ChoicesRequest, GenerationRequest
from server.services import Services
from server.text.renderer import PromptTooLongError, Renderer, RenderError
from server.text.stop_regex import StopRegexError

Result = TypeVar("Result")

logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A task, and what its HTTP request says about it."""

    task: Task
    record: RequestRecord
    headers: Headers
    services: Services

    @property
    def tenant(self) -> str:
        """The name under which the request queues: its API key's, or its user's where there are no keys."""
        return self.record.tenant or self.task.options.user or ""


@dataclass(frozen=True, slots=True)
class Reserved:
    """The request may be worked on: it counts against the queue's limit until the ticket is released."""

    call: Call
    ticket: Ticket
    arrival_time: float  # by the engine's clock


@dataclass(frozen=True, slots=True)
class Prepared:
    """The request as the engine takes it."""

    call: Call
    ticket: Ticket
    rendered: Rendered
    adds: tuple[AdmittedAdd, ...]  # one a prompt
    tally: Tally
    drafting: Drafting | None  # how a draft shortens the prompt first


@dataclass(frozen=True, slots=True)
class Submitted:
    """The engine has the request, and may still refuse it."""

    prepared: Prepared
    queue: EventQueue | DraftedQueue


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine works on the request. From here on its prompts count as used."""

    call: Call
    rendered: Rendered
    tally: Tally
    queue: EventQueue | DraftedQueue

    async def next(self, deadline: float | None = None) -> tuple[int, Event] | None:
        """Return the next event, counted, with the index of its prompt; None at the end.

        Raises `GenerationError`, `SlowReaderError`, and TimeoutError at `deadline` by the event loop's clock.
        """
        item = await self.queue.next(deadline)
        if item is not None:
            prompt, event = item
            self.tally.add(prompt, event)
            record = self.call.record
            record.num_output_tokens = self.tally.num_output_tokens
            if isinstance(event, Drafted):
                self._report(event)
            if isinstance(event, ChoiceDelta) and event.final is not None:
                record.finals.append(event.final)
                if event.final.cache is not None:
                    record.num_evicted_tokens += event.final.cache.num_evicted
        return item

    def _report(self, drafted: Drafted) -> None:
        """Report in the answer's headers what a draft did. They have gone out if the answer is streamed."""
        num_sent = sum(self.tally.num_prompt_tokens)
        self.call.record.headers |= {
            HEADER: f"{drafted.outcome}; read={drafted.num_read_tokens}; of={num_sent}",
            POOL_HEADER: drafted.pool,
            CACHE_POLICY_HEADER: drafted.pool,
        }


async def reserve(call: Call) -> Reserved:
    """Take a ticket for the request. Raises `ApiError`, `QueueFullError` and `UnavailableError`."""
    task = call.task
    record = call.record
    client = call.services.client
    arrival_time = client.now()
    record.model = task.model
    # Whose turn it is to tokenize: a batch's owner, or a user where there are no keys.
    tenant.set(call.tenant)
    check_limits(task.options, task.num_in_flight, call.services.settings)
    await record.quota.admit()
    num_sequences = task.num_in_flight * task.options.num_choices
    ticket = client.reserve(num_sequences, call.tenant, in_background=record.is_background)
    return Reserved(call, ticket, arrival_time)


async def without_generation(
    request: Request, services: Services, work: Callable[[], Awaitable[Result]]
) -> Result:
    """Return what `work` makes of texts, as tokens and their numbers.

    It counts as a request in its key's limits and in the queue, and ends when the client disconnects. Raises
    as `reserve` does.
    """

    async def worked() -> Result:
        return await work()

    record = RequestRecord.of(request.scope)
    await record.quota.admit()
    with services.client.reserve(1, record.tenant):
        return await unless_disconnected(request.receive, worked())


async def prepare(reserved: Reserved) -> Prepared:
    """Render the prompts and make the engine's requests of them. Raises `ApiError`."""
    call = reserved.call
    task = call.task
    services = call.services
    try:
        rendered = await task.render(_renderer(task, services))
    except PromptTooLongError as error:
        raise prompt_too_long(error.num_chars, services.client.spec, task.prompt_param) from error
    except RenderError as error:
        raise invalid_value(str(error), task.prompt_param) from error
    context = RequestContext(
        tenant=call.tenant,
        # Not the field `user`, which is not checked.
        cache_salt=call.record.tenant if services.settings.prefix_sharing is PrefixSharing.KEY else "",
        is_background=call.record.is_background,
        arrival_time=reserved.arrival_time,
        pool=None if task.pooling is not None else requested_pool(task.options, call.headers),
        seed=random.getrandbits(63),
        structure=rendered.structure,
        grammar=await _compile(rendered, task.options, services),
    )
    try:
        await services.grammars.check_stop_regexes(task.options.stop_regexes)
    except StopRegexError as error:
        raise invalid_value(f"'stop_regex' cannot be followed: {error}.", "stop_regex") from error
    adds = engine_requests(task, rendered, context, services)
    if services.settings.api.log_prompts:
        await _log_prompts(adds, services)
    await call.record.quota.reserve(sum(_max_cost(add, task) for add in adds))
    pools = tuple(services.client.spec.pools[add.pool].name for add in adds)
    tally = Tally(
        tuple(len(add.prompt_token_ids) for add in adds),
        pools,
        task.options.num_choices,
        returns_token_ids=isinstance(task.options, ChoicesRequest) and bool(task.options.return_token_ids),
    )
    chooses_pool = context.pool is None and len(services.client.spec.pools) > 1
    shortens = await _drafting(call, rendered, adds, chooses_pool=chooses_pool)
    if task.pooling is None and (shortens is None or not shortens.chooses_pool):
        call.record.headers |= {POOL_HEADER: tally.pool, CACHE_POLICY_HEADER: tally.pool}
    return Prepared(call, reserved.ticket, rendered, adds, tally, shortens)


@contextlib.contextmanager
def submit(prepared: Prepared) -> Iterator[Submitted]:
    """Hand the request to the engine; at the end of the block, abandon what is unfinished."""
    call = prepared.call
    services = call.services
    options = call.task.options
    text_options = TextOptions(
        stop=options.stop_strings,
        stop_regexes=options.stop_regexes,
        include_stop_string=bool(options.include_stop_str_in_output),
        skip_special_tokens=options.skip_special_tokens is not False,
        continues_prompt=call.task.continues_prompt,
        kept_token_ids=prepared.rendered.kept_token_ids,
    )

    def queue_of(*adds: AdmittedAdd) -> EventQueue:
        return EventQueue(
            services.client,
            adds,
            lambda add: Decoder(add, services.renderer, text_options, services.client.finish),
            prepared.ticket,
            services.settings.connections.write_timeout,
            call.task.max_in_flight,
        )

    if prepared.drafting is None:
        with queue_of(*prepared.adds) as queue:
            yield Submitted(prepared, queue)
    else:
        with DraftedQueue(services.client, prepared.drafting, queue_of) as drafted:
            yield Submitted(prepared, drafted)


async def accept(submitted: Submitted) -> Accepted:
    """Wait until the engine has taken the request. Raises `GenerationError`."""
    await submitted.queue.accepted()
    prepared = submitted.prepared
    record = prepared.call.record
    first = prepared.adds[0]
    record.num_prompt_tokens = sum(prepared.tally.num_prompt_tokens)
    if first.pooling is None:
        record.max_tokens = first.stop.max_tokens
        record.temperature = first.sampling.temperature
    return Accepted(prepared.call, prepared.rendered, prepared.tally, submitted.queue)


async def _drafting(
    call: Call, rendered: Rendered, adds: tuple[AdmittedAdd, ...], *, chooses_pool: bool
) -> Drafting | None:
    """Return how a draft shortens the prompt; None if none does, for a reason that a header may give."""
    services = call.services
    try:
        found = await drafting(call.task, rendered, adds, services, chooses_pool=chooses_pool)
    except RenderError:
        logger.warning("request %s is read whole: its draft cannot tokenize it", call.task.id, exc_info=True)
        services.metrics.drafted(Outcome.FAILED.value, 0)
        return None
    if isinstance(found, Skipped):
        call.record.headers[HEADER] = f"{Outcome.SKIPPED.value}; reason={found.value}"
        services.metrics.drafted(Outcome.SKIPPED.value, 0)
        return None
    return found


def _renderer(task: Task, services: Services) -> Renderer:
    """Return the renderer of a task. It tokenizes no prompt that is certainly too long, unless it is cut."""
    if task.truncates:
        return services.renderer
    return services.renderer.limited(services.client.spec.max_model_len)


async def _compile(rendered: Rendered, options: GenerationRequest, services: Services) -> str | None:
    """Return the grammar that the answers must follow.

    It is empty for a backend without token masks: admission refuses every grammar there. A limit of reasoning
    is ignored and reported where there is no reasoning, no token mask to end it, or a rule of tokens.
    """
    grammar = None
    structure = rendered.structure
    if structure is not None:
        grammar = await _compile_structure(structure, services)
    budget = options.thinking_budget
    if budget is None:
        return grammar
    has_masks = Feature.TOKEN_MASK in services.client.spec.features
    has_rules = structure is not None and structure.kind is StructureKind.TOKENS
    if rendered.thinking is None or not has_masks or has_rules:
        ignore(budget.param)
        return grammar
    return await services.grammars.limit_thinking(rendered.thinking, budget.num_tokens, grammar)


async def _compile_structure(structure: Structure, services: Services) -> str:
    if Feature.TOKEN_MASK not in services.client.spec.features:
        return ""
    try:
        return await services.grammars.compile(structure)
    except StructureError as error:
        param = error.param or structure.param
        raise invalid_value(f"'{param}' cannot be followed: {error}.", param.partition("[")[0]) from error


async def _log_prompts(adds: tuple[AdmittedAdd, ...], services: Services) -> None:
    for add in adds:
        prompt = await services.renderer.decode(add.prompt_token_ids)
        logger.info("prompt", extra=fields(request=add.request_id, prompt=prompt))


def _max_cost(add: AdmittedAdd, task: Task) -> int:
    """Return the most tokens that a prompt and its choices may use.

    An answer whose request does not limit it counts `DEFAULT_MAX_TOKENS`; the rest is settled at its end.
    """
    max_tokens = task.max_tokens(min(add.stop.max_tokens, DEFAULT_MAX_TOKENS))
    return len(add.prompt_token_ids) + add.num_choices * max_tokens
