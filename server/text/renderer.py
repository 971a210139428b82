"""The tokenizer as routes use it: asynchronous, so that a long prompt does not block the event loop.

A renderer is created empty, and `load` fills it in the thread that loads the model: importing and reading a
tokenizer takes seconds. The holder of an admission ticket (`server.engine.client`) may use it. The module
does not depend on requests or streams.
"""

import asyncio
import bisect
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from server.http.record import tenant
from server.text.generation_config import GenerationDefaults
from server.text.lanes import Lane
from server.text.question import Question
from server.text.tokenizer import (
    FramedText,
    PromptTooLongError,
    RenderError,
    Tokenizer,
    TokenizerInfo,
    UnsupportedTokenizerError,
)
from server.text.vocabulary import Vocabulary

__all__ = [
    "FramedText",
    "GenerationDefaults",
    "PromptTooLongError",
    "RenderError",
    "Renderer",
    "TokenizerInfo",
    "UnsupportedTokenizerError",
]

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_Result = TypeVar("_Result")

MAX_INLINE_CHARS = 4096  # about 2 ms of tokenizing; longer texts go to the lane of their size, and so do
# short ones while the first lane is at work
LANE_CHARS: Final = (32_768, 524_288)  # longest texts of all lanes but the last; about 20 ms and 0.3 s
_NUM_WORKERS: Final = 2  # of a lane: one key's text does not wait for another one's
# Long texts are tokenized at the lowest priority, so that on few cores they slow no decode step: beside
# twelve clients of 1 MB texts, two cores and a 100 M model, another key's short chats take 1.2 times as long
# as alone. At a priority of 10 they took 1.8 times as long, and 1.4 times as many texts were tokenized.
_LONG_TEXT_NICENESS: Final = 19
_NUMBER_CHARS = 4  # of a number or a literal, about
_MAX_QUESTION_CHARS = 1536  # of its beginning, and of its end: some 256 tokens, or more


class Renderer:
    """A model's tokenizer and chat template. `close` it at the end."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._loaded = tokenizer
        self._max_tokens: int | None = None
        # A tokenizer's state changes while it encodes: whether control tokens are ordinary text. So never two
        # threads at once, and each worker but the first one of the first lane has a copy.
        self._lanes = [
            Lane(
                f"renderer-{index}",
                functools.partial(self._tokenizer_of, index),
                _NUM_WORKERS,
                niceness=_LONG_TEXT_NICENESS if index else 0,
            )
            for index in range(len(LANE_CHARS) + 1)
        ]

    def load(self, model: str, chat_template: str | None = None) -> None:
        """Read the tokenizer of a local folder or a hub id. Blocks for seconds. A template replaces the
        model's.

        Raises the exceptions of transformers.
        """
        self._loaded = Tokenizer.load(model, chat_template)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def limited(self, max_tokens: int) -> Self:
        """Return this renderer with a limit on prompts: it raises `PromptTooLongError` before it tokenizes
        a text whose length alone shows that it is longer.
        """
        other = copy.copy(self)
        other._max_tokens = max_tokens
        return other

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]:
        """Return the prompt of a conversation.

        `messages` are those of the OpenAI API, whose content is a string or a list of text parts. `variables`
        are passed to the template; none is in `RESERVED_VARIABLES`. Control tokens typed in a message
        become ordinary text. Raises `RenderError`.
        """

        def render(tokenizer: Tokenizer) -> tuple[int, ...]:
            return tokenizer.render_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=variables,
            )

        self._check_length(_num_chars(messages) + _num_chars(tools))
        # Templates may write keys, numbers and variables too.
        return await self._run(render, _num_chars((messages, tools, variables or {}), is_all=True))

    async def encode_question(self, messages: Sequence[Mapping[str, Any]]) -> Question | None:
        """Return beginning and end of the last user message as ordinary text; None without one.

        Raises `RenderError`.
        """
        return await self._run(
            lambda tokenizer: tokenizer.encode_question(messages, _MAX_QUESTION_CHARS), _MAX_QUESTION_CHARS
        )

    async def encode_framed(self, text: str, *, in_template: bool) -> FramedText:
        """Return a text, as a user's message or as it is, and where its tokens come from.

        Raises `RenderError` for a tokenizer that does not tell.
        """
        return await self._run(
            lambda tokenizer: tokenizer.encode_framed(text, in_template=in_template), len(text)
        )

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of a raw prompt, in which control tokens keep their meaning.

        Raises `RenderError`.
        """
        self._check_length(len(text))
        return await self._run(
            lambda tokenizer: tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text)
        )

    async def with_special_tokens(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return a prompt with the special tokens that the tokenizer adds around a text."""
        return await self._run(lambda tokenizer: tokenizer.with_special_tokens(prompt), 0)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with the special ones.

        Raises `RenderError` for ids outside the vocabulary.
        """
        return await self._run(lambda tokenizer: tokenizer.decode(token_ids), len(token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text. They may be a part of a character."""
        return self.vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Return the text that a token adds, with U+FFFD for bytes that form no whole character."""
        return self.vocabulary.token_text(token_id)

    def grammar_tokenizer(self) -> "LLTokenizer":
        """Return the vocabulary in the grammar library's form. Takes up to a second.

        Raises `UnsupportedTokenizerError`.
        """
        return self._tokenizer.grammar_tokenizer()

    @property
    def vocabulary(self) -> Vocabulary:
        return self._tokenizer.vocabulary

    @property
    def info(self) -> TokenizerInfo:
        return self._tokenizer.info

    @property
    def defaults(self) -> GenerationDefaults:
        """The values of sampling parameters that a request does not set."""
        return self._tokenizer.defaults

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids that end an answer, unless a request sets `ignore_eos`."""
        return self._tokenizer.stop_token_ids

    @property
    def _tokenizer(self) -> Tokenizer:
        assert self._loaded is not None, "used without a ticket: the tokenizer is not loaded"
        return self._loaded

    def _check_length(self, num_chars: int) -> None:
        longest = self._tokenizer.max_token_chars
        if self._max_tokens is not None and longest is not None and num_chars > self._max_tokens * longest:
            raise PromptTooLongError(num_chars, self._max_tokens)

    def _tokenizer_of(self, lane: int, worker: int) -> Tokenizer:
        return self._tokenizer if lane == worker == 0 else self._tokenizer.copy()

    async def _run(self, work: Callable[[Tokenizer], _Result], size: int) -> _Result:
        if size <= MAX_INLINE_CHARS and self._lanes[0].is_idle:
            return work(self._tokenizer)
        lane = self._lanes[bisect.bisect_left(LANE_CHARS, size)]
        return await asyncio.wrap_future(lane.submit(tenant.get(), work))


def _num_chars(value: object, *, is_all: bool = False) -> int:
    """Return the total length of all strings in a value, with `is_all` about that of keys and numbers too."""
    total = 0
    unseen = [value]  # no recursion: clients decide how deep a value is
    while unseen:
        item = unseen.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            unseen += [*item, *item.values()] if is_all else item.values()
        elif isinstance(item, Sequence):
            unseen += item
        elif is_all:
            total += _NUMBER_CHARS
    return total
