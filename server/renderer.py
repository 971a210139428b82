"""Messages and text to token ids, and back: the tokenizer and the chat template of a model.

A renderer is made at once and filled by `load`, in whatever thread loads the model: importing and reading a tokenizer takes seconds. Whoever
holds a ticket of the engine (`server.client`) may use it. It knows no request, no stream and no stop string.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class RenderError(ValueError):
    """The messages or the text cannot be rendered; the message is fit for a client."""


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What clients that tokenize for themselves want to know."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    added_tokens: Mapping[str, int]  # text to id


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a model's publishers recommend for fields that a request leaves out (`generation_config.json`)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Renderer:
    """A model's tokenizer and chat template."""

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> tuple[int, ...]:
        """Return the prompt of a conversation: messages as in the OpenAI API, with a string or a list of text parts as content.

        Control tokens typed in a message become ordinary text. Raises `RenderError`.
        """
        raise NotImplementedError

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of a raw prompt, in which control tokens mean what they say. Raises `RenderError`."""
        raise NotImplementedError

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, special ones included. Raises `RenderError` for ids that are not in the vocabulary."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text, in UTF-8: possibly a part of a character."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """Return what a token adds to a text, with U+FFFD for bytes that are not a character by themselves."""
        raise NotImplementedError

    @property
    def info(self) -> TokenizerInfo:
        raise NotImplementedError

    @property
    def defaults(self) -> GenerationDefaults:
        """What a request gets for the sampling parameters that it leaves out."""
        raise NotImplementedError

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids that end an answer unless a request says `ignore_eos`."""
        raise NotImplementedError
