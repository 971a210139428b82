"""The interface between a family of the API and the path that all requests take.

A family has a task, which renders a request's prompts, and formatters, which turn events into bodies.
Rendering returns the formatters, so they cannot be used before there is a prompt.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backends.interface import PromptPooling
from server.generation.events import Event
from server.generation.tally import Tally
from server.grammar.structure import Structure
from server.grammar.thinking import Thinking
from server.http.errors import ApiError
from server.http.streams import EventStream
from server.protocol.generation import GenerationRequest
from server.text.question import Question
from server.text.renderer import Renderer
from server.text.shortening import Passage

Payload: TypeAlias = Mapping[str, object]
"""One JSON object of an answer: a body, or an event of a stream."""


class BodyFormatter(Protocol):
    """Builds one whole answer."""

    def add(self, prompt: int, event: Event, tally: Tally) -> None:
        """Take an event of a prompt, which `tally` has counted."""
        ...

    async def body(self, tally: Tally) -> Payload:
        """Return the answer. Every choice has ended."""
        ...


class StreamFormatter(Protocol):
    """Turns engine events into the events of a family's stream. It keeps only text that it needs again.

    The end is asynchronous, since some families store their answer first.
    """

    @property
    def stream_type(self) -> type[EventStream]:
        """How the events are written."""
        ...

    def opening(self) -> Sequence[Payload]:
        """Return the events that a stream begins with, once the engine has accepted the request."""
        ...

    def add(self, prompt: int, event: Event, tally: Tally) -> Sequence[Payload]:
        """Take an event of a prompt, which `tally` has counted; return the events to send."""
        ...

    async def closing(self, tally: Tally) -> Sequence[Payload]:
        """Return the events that a complete stream ends with."""
        ...

    async def failure(self, error: ApiError, tally: Tally) -> Sequence[Payload]:
        """Return the events that a stream ends with when it cannot be completed."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """The texts that a prompt is made of, for making a shorter one.

    `render` returns the prompt with other texts in place of the passages. `question` is the beginning of
    what the user asks. A prompt that is no chat is raw text, for a draft too.
    """

    passages: tuple[Passage, ...]
    question: str
    render: Callable[[Sequence[str]], Awaitable[tuple[int, ...]]]  # raises `RenderError`
    is_chat: bool = True


@dataclass(frozen=True, slots=True)
class Rendered:
    """A request's prompts, what its answers must look like, and who formats them."""

    prompts: tuple[tuple[int, ...], ...]  # token ids
    body: Callable[[], BodyFormatter]
    stream: Callable[[], StreamFormatter] | None = None  # None: the family has no streams
    structure: Structure | None = None
    thinking: Thinking | None = None  # None: the model marks no reasoning
    kept_token_ids: frozenset[int] = frozenset()  # special tokens whose text the formatters need
    question: Question | None = None  # a chat's last user message, or as a completion names it
    prediction: tuple[int, ...] = ()  # the tokens of a guess of the answer
    source: Source | None = None  # of the only prompt; None for one that is not made of text


@dataclass(frozen=True, slots=True)
class Task:
    """One request of a family.

    `max_tokens(room)` is the token limit of an answer if the sequence has room for `room` tokens. The engine
    has at most `max_in_flight` of the prompts at once; None is all.
    """

    id: str
    model: str
    options: GenerationRequest
    num_prompts: int
    prompt_param: str  # the parameter that prompts come from
    max_tokens: Callable[[int], int]
    render: Callable[[Renderer], Awaitable[Rendered]]  # raises `RenderError` and `ApiError`
    num_logprobs: int | None = None  # alternatives of each generated token; None: no log-probabilities
    num_prompt_logprobs: int | None = None
    returns_kept_tokens: bool = False
    continues_prompt: bool = False  # the answer's text goes on where the prompt's ends
    pooling: PromptPooling | None = None  # an embedding is requested, and no text
    max_in_flight: int | None = None
    shrinks_to_room: bool = False  # an answer whose limit exceeds the room gets what room there is
    truncates: bool = False  # prompts that are too long are cut

    @property
    def num_in_flight(self) -> int:
        """The most prompts that the engine has at once."""
        return min(self.num_prompts, self.max_in_flight or self.num_prompts)
