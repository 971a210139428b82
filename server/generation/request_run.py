"""One request on its way through the engine, of whichever family: checked, rendered, handed in, and its events counted."""

import logging
import random
from collections.abc import Iterable, Mapping
from typing import Final

from scheduler.admission import max_output_tokens, route
from scheduler.messages import Add, StopCriteria
from server.engine.client import Ticket
from server.generation.answer import Answer, Tally
from server.generation.checks import (
    check_admissible,
    check_features,
    check_length,
    check_limits,
    check_prefill,
    check_prompt,
    check_structure,
    check_vocabulary,
    pool_named,
)
from server.generation.feed import EventFeed
from server.generation.output import Accepted, ChoiceDelta, Event, Generation, Progress, PromptLogprobs
from server.grammar.structure import StructureError
from server.http.errors import invalid_value
from server.http.rate_limits import UNSAID_MAX_TOKENS
from server.http.record import RequestRecord
from server.logs import fields
from server.services import Services
from server.text.renderer import RenderError

logger: Final = logging.getLogger(__name__)

CACHE_POLICY_HEADER = "x-cache-policy"


class RequestRun:
    """Use it in this order: `reserve`, `prepare`, `feed`, `accept`, and `take` for each event; the first four may refuse the request."""

    def __init__(
        self, services: Services, answer: Answer, record: RequestRecord, cache_policy: str | None
    ) -> None:
        self._services = services
        self._answer = answer
        self._record = record
        record.model = answer.model
        self._tenant = record.tenant or answer.options.user or ""
        self._options = answer.options
        self._cache_policy = cache_policy  # what a header asks for
        self._arrival_time = services.client.now()
        self._adds: list[Add] = []
        self.tally = Tally.start((), (), 0)

    def reserve(self) -> Ticket:
        """Take the places that the request needs. Raises `ApiError`, `QueueFullError` and `UnavailableError`."""
        check_limits(self._options, self._answer.num_prompts, self._services.settings)
        self._record.quota.admit()
        num_sequences = self._answer.num_prompts * self._options.num_choices
        return self._services.client.reserve(
            num_sequences, self._tenant, in_background=self._record.is_background
        )

    async def prepare(self) -> None:
        """Find out what the engine is to be asked for. Raises `ApiError`."""
        self._adds = await self._find_adds(self._arrival_time)
        if self._services.settings.log_prompts:
            await self._log_prompts()
        self._record.quota.reserve(sum(map(self._cost, self._adds)))
        num_tokens = tuple(len(add.prompt_token_ids) for add in self._adds)
        pools = tuple(self._services.client.spec.pools[add.pool].name for add in self._adds)
        self.tally = Tally.start(num_tokens, pools, self._options.num_choices)
        self._record.headers[CACHE_POLICY_HEADER] = self.tally.policy

    async def _log_prompts(self) -> None:
        for add in self._adds:
            logger.info(
                "prompt",
                extra=fields(
                    request=add.request_id, prompt=await self._services.renderer.decode(add.prompt_token_ids)
                ),
            )

    def _cost(self, add: Add) -> int:
        """Return how many tokens a prompt and its choices may come to, as far as the request says so."""
        return len(add.prompt_token_ids) + add.num_choices * self._answer.max_tokens(
            min(add.stop.max_tokens, UNSAID_MAX_TOKENS)
        )

    def detach(self) -> None:
        """Go on when the HTTP request has been answered; `end` it at the end."""
        self._record.detach()

    def end(self) -> None:
        self._record.end()

    def take(self, prompt: int, event: Event) -> Iterable[Mapping[str, object]]:
        """Take an event into account and return the events of the answer that tell it, which need not be taken."""
        tally = self.tally
        match event:
            case Progress(num_computed_prompt_tokens=num_read):
                tally.num_read[prompt] = num_read
            case PromptLogprobs(tokens=tokens):
                self._answer.take_prompt_logprobs(prompt, tokens)
            case ChoiceDelta():
                index = prompt * self._options.num_choices + event.choice
                tally.num_read[prompt] = tally.num_prompt_tokens[prompt]
                num_before = tally.choices[index].num_tokens
                tally.choices[index].add(event)
                if event.final is not None:
                    self._record.finals.append(event.final)
                self._record.num_output_tokens += tally.choices[index].num_tokens - num_before
                return self._answer.read(index, event, tally)
            case Accepted():
                pass
        return ()

    async def accept(self, feed: EventFeed) -> None:
        """Wait until the engine has taken the request: from here on it costs its key the prompt. Raises `GenerationError`."""
        await feed.accepted()
        self._record.num_prompt_tokens = sum(self.tally.num_prompt_tokens)
        self._record.max_tokens, self._record.temperature = (
            self._adds[0].stop.max_tokens,
            self._adds[0].sampling.temperature,
        )

    async def finish(self, feed: EventFeed) -> None:
        """Take all events that are to come."""
        while (item := await feed.next()) is not None:
            self.take(*item)
        cache = self.tally.cache
        self._record.headers["x-cache-kept-tokens"] = str(cache["kept_tokens"])
        self._record.headers["x-cache-evicted-tokens"] = str(cache["evicted_tokens"])
        self._record.headers["x-cache-compression"] = f"{cache['compression']:g}"

    def feed(self, ticket: Ticket) -> EventFeed:
        """Return the events, to be entered as a context: there the engine is asked."""
        options, services = self._options, self._services
        generations = [
            Generation(
                services.client,
                services.renderer,
                add,
                stop=options.stop_strings,
                include_stop_str_in_output=bool(options.include_stop_str_in_output),
                skip_special_tokens=options.skip_special_tokens is not False,
                continues_prompt=self._answer.continues_prompt,
                kept_token_ids=self._answer.kept_token_ids,
            )
            for add in self._adds
        ]
        return EventFeed(generations, ticket, services.settings.connections.write_timeout)

    async def _find_adds(self, arrival_time: float) -> list[Add]:
        """Return what the engine is asked for, one request a prompt."""
        check_vocabulary(self._options, self._services.client.spec.vocab_size)
        try:
            prompts = await self._answer.render(self._services.renderer)
        except RenderError as error:
            raise invalid_value(str(error), self._answer.prompt_param) from error
        grammar = await self._grammar()
        seed = random.getrandbits(63)
        return [
            self._add(number, prompt, seed, arrival_time, grammar) for number, prompt in enumerate(prompts)
        ]

    async def _grammar(self) -> str | None:
        """Return the grammar that the answers must follow."""
        structure = self._answer.structure
        if structure is None:
            return None
        check_structure(structure, self._services.client.spec.features)
        try:
            return await self._services.grammars.compile(structure)
        except StructureError as error:
            raise invalid_value(
                f"'{structure.param}' cannot be followed: {error}.", structure.param
            ) from error

    def _add(
        self, number: int, prompt: tuple[int, ...], seed: int, arrival_time: float, grammar: str | None
    ) -> Add:
        options, answer = self._options, self._answer
        spec, settings = self._services.client.spec, self._services.settings
        stop_token_ids = frozenset() if options.ignore_eos else self._services.renderer.stop_token_ids
        check_prompt(prompt, spec.vocab_size, answer.prompt_param)
        check_prefill(options.num_prefill_tokens, len(prompt), answer.prompt_param)
        num_forced = 0 if options.num_prefill_tokens is None else len(prompt) - options.num_prefill_tokens
        pool = self._pool(len(prompt), num_forced)
        room = max_output_tokens(len(prompt), num_forced, spec, pool)
        max_tokens = answer.max_tokens(max(room, 1))
        check_length(len(prompt), num_forced, max_tokens, room, spec, pool, answer.prompt_param)
        min_tokens = options.min_tokens or 0
        if min_tokens > max_tokens:
            raise invalid_value(
                f"'min_tokens' is {min_tokens}, but at most {max_tokens} tokens may be generated.",
                "min_tokens",
            )
        add = Add(
            request_id=f"{answer.id}-{number}",
            prompt_token_ids=prompt,
            sampling=options.sampling_params(self._services.renderer.defaults, seed, answer.num_logprobs),
            stop=StopCriteria(
                max_tokens, min_tokens, stop_token_ids | frozenset(options.stop_token_ids or ())
            ),
            arrival_time=arrival_time,
            num_choices=options.num_choices,
            priority=options.priority or 0,
            queue_timeout=_shorter(options.queue_timeout, settings.queue_timeout),
            timeout=_shorter(options.request_timeout, settings.request_timeout),
            num_prompt_logprobs=answer.num_prompt_logprobs,
            num_prefill_tokens=options.num_prefill_tokens,
            pool=pool,
            grammar=grammar,
            tenant=self._tenant,
            is_background=self._record.is_background,
        )
        check_features(options, add, spec.features)
        check_admissible(add, spec, answer.prompt_param)
        return add

    def _pool(self, num_prompt_tokens: int, num_forced: int) -> int:
        """Return the pool that field or header ask for, or that of this length; an answer of unsaid length counts one token."""
        asked, spec = self._options.cache_policy, self._services.client.spec
        if None not in (asked, self._cache_policy) and asked != self._cache_policy:
            raise invalid_value(
                f"'cache_policy' is {asked!r}, but the header {CACHE_POLICY_HEADER} says {self._cache_policy!r}.",
                "cache_policy",
            )
        name = self._cache_policy if asked is None else asked
        if name is not None:
            return pool_named(name, spec)
        return route(num_prompt_tokens, num_forced, self._answer.max_tokens(1), spec)


def _shorter(given: float | None, bound: float | None) -> float | None:
    """Return the shorter of two times, of which None is endless."""
    return min((seconds for seconds in (given, bound) if seconds is not None), default=None)
