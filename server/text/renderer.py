"""The tokenizer as routes use it: asynchronous, so that a long prompt does not block the event loop.

A renderer is created empty, and `load` fills it in the thread that loads the model: importing and reading a
tokenizer takes seconds. The holder of an admission ticket (`server.engine.client`) may use it. The module
does not depend on requests or streams.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from server.text.generation_config import GenerationDefaults
from server.text.tokenizer import RenderError, Tokenizer, TokenizerInfo, UnsupportedTokenizerError
from server.text.vocabulary import Vocabulary

__all__ = ["GenerationDefaults", "RenderError", "Renderer", "TokenizerInfo", "UnsupportedTokenizerError"]

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_Result = TypeVar("_Result")

MAX_INLINE_CHARS = 4096  # about 2 ms of tokenizing; longer texts go to the worker thread, one after another,
# and so do short ones that come meanwhile
_MAX_QUESTION_CHARS = 1024  # a policy reads at most a few dozen tokens of a question again


class Renderer:
    """A model's tokenizer and chat template. `close` it at the end."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._loaded = tokenizer
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="renderer")
        self._pending: set[Future[Any]] = set()  # the worker's

    def load(self, model: str) -> None:
        """Read the tokenizer of a local folder or a hub id. Blocks for seconds.

        Raises the exceptions of transformers.
        """
        self._loaded = Tokenizer.load(model)

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)

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
        tokenizer = self._tokenizer

        def render() -> tuple[int, ...]:
            return tokenizer.render_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=variables,
            )

        return await self._run(render, _num_chars(messages) + _num_chars(tools))

    async def encode_question(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the beginning of the last user message as ordinary text; () without one.

        Raises `RenderError`.
        """
        tokenizer = self._tokenizer
        return await self._run(
            lambda: tokenizer.encode_question(messages, _MAX_QUESTION_CHARS), _MAX_QUESTION_CHARS
        )

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of a raw prompt, in which control tokens keep their meaning.

        Raises `RenderError`.
        """
        tokenizer = self._tokenizer
        return await self._run(
            lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text)
        )

    async def with_special_tokens(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return a prompt with the special tokens that the tokenizer adds around a text."""
        tokenizer = self._tokenizer
        return await self._run(lambda: tokenizer.with_special_tokens(prompt), 0)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with the special ones.

        Raises `RenderError` for ids outside the vocabulary.
        """
        tokenizer = self._tokenizer
        return await self._run(lambda: tokenizer.decode(token_ids), len(token_ids))

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

    async def _run(self, work: Callable[[], _Result], size: int) -> _Result:
        # A tokenizer's state changes while it encodes: whether control tokens are ordinary text. So never two
        # threads at once.
        if size <= MAX_INLINE_CHARS and not self._pending:
            return work()
        future = self._worker.submit(work)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)  # not after `await`, which a client may cancel
        return await asyncio.wrap_future(future)


def _num_chars(value: object) -> int:
    """Return the total length of all strings in a message or in several."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_chars(item) for item in value.values())
    return sum(_num_chars(item) for item in value) if isinstance(value, list | tuple) else 0
