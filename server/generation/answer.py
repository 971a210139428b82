"""An answer in the making: what the families have in common between the events of an engine and the bodies of the API."""

import abc
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.messages import CacheUse
from server.generation.output import ChoiceDelta
from server.grammar.structure import Structure
from server.http.errors import ApiError
from server.protocol.generation import ChoicesRequest, GenerationRequest
from server.protocol.prompt_logprobs import PromptLogprobs, prompt_logprobs
from server.protocol.usage import CacheUsage, Usage, usage
from server.text.logprobs import TokenLogprob
from server.text.renderer import Renderer


@dataclass(slots=True)
class AnsweredChoice:
    """One choice as far as it has come."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    num_packed_prompt_tokens: int = 0
    num_packed_tokens: int = 0
    cache: CacheUse | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        self.logprobs += delta.logprobs
        self.token_ids += delta.token_ids
        self.num_tokens += len(delta.token_ids)
        if delta.final is not None:
            self.num_tokens = delta.final.num_output_tokens
            self.finish_reason, self.stop_reason, self.matched_stop = (
                delta.finish_reason,
                delta.stop_reason,
                delta.matched_stop,
            )
            self.cache = delta.final.cache
            self.num_packed_prompt_tokens = delta.final.num_packed_prompt_tokens
            self.num_packed_tokens = self.num_tokens - min(
                delta.final.num_prefill_output_tokens, self.num_tokens
            )


@dataclass(slots=True)
class Tally:
    """Tokens read and made so far, over all prompts and choices of a request, and the pool that each prompt was sent to."""

    num_prompt_tokens: tuple[int, ...]
    pools: tuple[str, ...]
    num_read: list[int]
    choices: list[AnsweredChoice]

    @classmethod
    def start(cls, num_prompt_tokens: tuple[int, ...], pools: tuple[str, ...], num_choices: int) -> "Tally":
        choices = [AnsweredChoice() for _ in range(len(num_prompt_tokens) * num_choices)]
        return cls(num_prompt_tokens, pools, [0] * len(num_prompt_tokens), choices)

    @property
    def policy(self) -> str:
        """The names of the pools that have a part in this."""
        return ", ".join(dict.fromkeys(self.pools))

    @property
    def cache(self) -> CacheUsage:
        num_choices = len(self.choices) // len(self.num_prompt_tokens)
        uses = [choice.cache for choice in self.choices if choice.cache is not None]
        num_kept = sum(use.num_live for use in uses)
        return {
            "policy": self.policy,
            "kept_tokens": num_kept,
            "evicted_tokens": sum(use.num_evicted for use in uses),
            "compression": round(sum(use.num_tokens for use in uses) / num_kept, 3) if num_kept else 1.0,
            "packed_prompt_tokens": sum(
                choice.num_packed_prompt_tokens for choice in self.choices[::num_choices]
            ),
            "packed_completion_tokens": sum(choice.num_packed_tokens for choice in self.choices),
        }

    @property
    def usage(self) -> Usage:
        num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self.choices)
        return usage(
            sum(self.num_prompt_tokens),
            sum(choice.num_tokens for choice in self.choices),
            num_reasoning_tokens,
            self.cache,
        )

    @property
    def progress(self) -> str:
        """What is being done, for whoever waits."""
        total = sum(self.num_prompt_tokens)
        return f"prefill {sum(self.num_read)}/{total}" if sum(self.num_read) < total else "decode"


class Answer(abc.ABC):
    """The answer to one request of a family. Its choices are numbered prompt by prompt, `n` to each."""

    id_prefix: str
    names_events: bool = (
        False  # whether events carry their type as the protocol's own, and no mark ends the stream
    )
    prompt_param: str  # the parameter that a prompt comes from

    def __init__(self, request: GenerationRequest, model: str) -> None:
        self.options = request
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.model = model
        self._created = int(time.time())
        self._prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}  # by prompt

    @property
    @abc.abstractmethod
    def num_prompts(self) -> int: ...

    @property
    @abc.abstractmethod
    def num_logprobs(self) -> int | None:
        """How many alternatives of each generated token are asked for; None: no log-probabilities at all."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        return None

    @property
    @abc.abstractmethod
    def continues_prompt(self) -> bool:
        """Whether the answer's text goes on where the prompt's ends."""

    @property
    def kept_token_ids(self) -> frozenset[int]:
        """Special tokens whose text belongs to the answer's form."""
        return frozenset()

    @property
    def structure(self) -> Structure | None:
        """What the answer must look like."""
        return self.options.structure

    @abc.abstractmethod
    async def render(self, renderer: Renderer) -> tuple[tuple[int, ...], ...]:
        """Return the prompts' token ids. Raises `RenderError`."""

    @abc.abstractmethod
    def max_tokens(self, room: int) -> int:
        """Return how many tokens to generate at most where there is room for `room` of them, which may be too few."""

    def take_prompt_logprobs(self, prompt: int, tokens: tuple[TokenLogprob, ...]) -> None:
        """Remember what was asked for with `num_prompt_logprobs`."""
        self._prompt_logprobs[prompt] = tokens

    @abc.abstractmethod
    def read(self, index: int, delta: ChoiceDelta, tally: Tally) -> Iterable[Mapping[str, object]]:
        """Take a delta, which `tally` has counted, into account and return the events that tell it, which need not be taken."""

    @abc.abstractmethod
    def body(self, tally: Tally) -> Mapping[str, object]:
        """Return the whole answer."""

    def opening(self) -> Iterable[Mapping[str, object]]:
        """Return the events that a stream begins with, once the engine has accepted."""
        return ()

    @abc.abstractmethod
    def closing(self, tally: Tally) -> Iterable[Mapping[str, object]]:
        """Return the events that a complete stream ends with."""

    @abc.abstractmethod
    def failure(self, error: ApiError, tally: Tally) -> Iterable[Mapping[str, object]]:
        """Return the events that a stream ends with when it cannot be completed."""


class ChoicesAnswer(Answer):
    """An answer in OpenAI's older shape: numbered choices in an envelope, streamed as chunks."""

    object_name: str
    chunk_name: str

    def __init__(self, request: ChoicesRequest, model: str) -> None:
        super().__init__(request, model)
        self._choices_request = request
        self._prompt_token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self._choices_request.prompt_logprobs

    async def render(self, renderer: Renderer) -> tuple[tuple[int, ...], ...]:
        rendered = await self._render(renderer)
        self._prompt_token_ids = tuple(map(self._choices_request.truncated, rendered))
        return self._prompt_token_ids

    @abc.abstractmethod
    async def _render(self, renderer: Renderer) -> tuple[tuple[int, ...], ...]:
        """Return the prompts' token ids, whole."""

    @abc.abstractmethod
    def choice(self, index: int, choice: AnsweredChoice) -> Mapping[str, object]:
        """Return a whole choice."""

    @abc.abstractmethod
    def chunk_choices(self, index: int, delta: ChoiceDelta) -> Iterable[Mapping[str, object]]:
        """Return the next pieces of a streamed choice, one a chunk."""

    def read(self, index: int, delta: ChoiceDelta, tally: Tally) -> Iterable[Mapping[str, object]]:
        return (self.chunk(choice) | self._counts(tally) for choice in self.chunk_choices(index, delta))

    def body(self, tally: Tally) -> dict[str, object]:
        whole = [self.choice(index, choice) for index, choice in enumerate(tally.choices)]
        return self._envelope(self.object_name) | {"choices": whole, "usage": tally.usage}

    def closing(self, tally: Tally) -> Iterable[Mapping[str, object]]:
        return (self.chunk() | {"usage": tally.usage},) if self._choices_request.includes_usage else ()

    def failure(self, error: ApiError, tally: Tally) -> Iterable[Mapping[str, object]]:  # noqa: ARG002
        return (error.body(),)

    def chunk(self, *choices: Mapping[str, object]) -> dict[str, object]:
        return self._envelope(self.chunk_name) | {"choices": list(choices)}

    def prompt_logprobs(self, prompt: int) -> PromptLogprobs | None:
        """Return vLLM's field, if it was asked for. A prompt of one token has nothing to tell but that token."""
        num_top, tokens = self._choices_request.prompt_logprobs, self._prompt_logprobs.get(prompt)
        if num_top is None:
            return None
        return [None] if tokens is None else prompt_logprobs(tokens, num_top)

    @property
    def returns_token_ids(self) -> bool:
        return bool(self._choices_request.return_token_ids)

    def prompt_token_ids(self, prompt: int) -> list[int] | None:
        """Return vLLM's field, if it was asked for."""
        return list(self._prompt_token_ids[prompt]) if self.returns_token_ids else None

    def named(self, tokens: Iterable[TokenLogprob]) -> list[TokenLogprob]:
        """Return tokens called as was asked for: by their text or by their id."""
        return [
            token.by_id() if self._choices_request.return_tokens_as_token_ids else token for token in tokens
        ]

    def _counts(self, tally: Tally) -> dict[str, object]:
        options = self._choices_request
        return (
            {"usage": tally.usage if options.includes_continuous_usage else None}
            if options.includes_usage
            else {}
        )

    def _envelope(self, name: str) -> dict[str, object]:
        return {"id": self.id, "object": name, "created": self._created, "model": self.model}
