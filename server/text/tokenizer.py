"""A model's tokenizer and chat template: synchronous, and constant once loaded.

Wraps a `transformers` tokenizer. Chat templates come with the model and are rendered in transformers'
sandbox. Text from clients is never used as a template. The module does not depend on requests or streams.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from jinja2 import TemplateError

from server.text.generation_config import (
    GenerationDefaults,
    eos_token_ids,
    generation_defaults,
    read_generation_config,
)
from server.text.question import Question
from server.text.vocabulary import Vocabulary, longest_token

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase


# Names of chat template variables that clients cannot set: they are arguments of `apply_chat_template`.
RESERVED_VARIABLES: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "generation_indices",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


_PLACE: Final = "SNAPSERVE"  # of the text in a template


class RenderError(ValueError):
    """The messages or the text cannot be rendered; the message is fit for a client."""


class PromptTooLongError(RenderError):
    """A prompt's number of characters shows that it has more tokens than a sequence may have."""

    def __init__(self, num_chars: int, max_tokens: int) -> None:
        super().__init__(f"{num_chars} characters are more than {max_tokens} tokens")
        self.num_chars = num_chars
        self.max_tokens = max_tokens


@dataclass(frozen=True, slots=True)
class FramedText:
    """The tokens of a text with those of a template around it, and where the text's own come from.

    `offsets` are the characters of the tokens from `num_before` on, which are the text's.
    """

    token_ids: tuple[int, ...]
    num_before: int
    offsets: tuple[tuple[int, int], ...]


class UnsupportedTokenizerError(Exception):
    """Grammars cannot use the tokenizer: its tokens' bytes are unknown, or it has no special stop token."""


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """The properties of a tokenizer, for clients that tokenize themselves."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    added_tokens: Mapping[str, int]  # text to id


class Tokenizer:
    """Converts text to ids, messages to ids, and ids to text."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", generation_config: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self.max_token_chars = longest_token(tokenizer)
        self.defaults: GenerationDefaults = generation_defaults(generation_config or {})
        eos = frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
        self.stop_token_ids = eos | eos_token_ids(generation_config or {})

    @classmethod
    def load(cls, model: str, chat_template: str | None = None) -> Self:
        """Read the tokenizer of a local folder or a hub id. Takes seconds. A template replaces the model's.

        Code that comes with a model is never run.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        return cls(tokenizer, read_generation_config(model))

    def copy(self) -> Self:
        """Return a tokenizer that another thread can use, with the same vocabulary. Takes up to a second."""
        other = copy.copy(self)
        other._tokenizer = copy.deepcopy(self._tokenizer)
        return other

    @property
    def info(self) -> TokenizerInfo:
        inner = self._tokenizer
        return TokenizerInfo(
            tokenizer_class=type(inner).__name__,
            vocab_size=len(self.vocabulary),
            bos_token=inner.bos_token,
            eos_token=inner.eos_token,
            pad_token=inner.pad_token,
            unk_token=inner.unk_token,
            chat_template=_template_text(inner.chat_template),
            added_tokens=dict(inner.added_tokens_encoder),
        )

    def grammar_tokenizer(self) -> "LLTokenizer":
        """Return the vocabulary in the grammar library's form; its `eos_token` is a stop token.

        Raises `UnsupportedTokenizerError`.
        """
        from llguidance.hf import from_tokenizer
        from transformers import PreTrainedTokenizerFast

        ends = self.stop_token_ids & self.vocabulary.special_token_ids
        if not ends or not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise UnsupportedTokenizerError("this model's tokenizer cannot be used with grammars")
        return from_tokenizer(self._tokenizer, eos_token=min(ends))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of a raw prompt, in which control tokens keep their meaning.

        Raises `RenderError`.
        """
        _check_unicode(text)
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def with_special_tokens(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return a prompt with the special tokens that the tokenizer adds around a text."""
        plain = self.encode("a", add_special_tokens=False)
        whole = self.encode("a", add_special_tokens=True)
        starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
        if not starts:
            return prompt  # the tokenizer does not add, but changes
        return (*whole[: starts[0]], *prompt, *whole[starts[0] + len(plain) :])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with the special ones.

        Raises `RenderError` for ids outside the vocabulary.
        """
        size = len(self.vocabulary)
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise RenderError(f"token id {token_id} is outside the vocabulary of {size} tokens")
        return self.vocabulary.decode(list(token_ids))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the prompt of a conversation.

        The rendered text is encoded in one piece, as in training, so that merges across the borders of
        messages are kept. It is cut only at control tokens typed in a message, which become ordinary text.
        Raises `RenderError`.
        """
        if self._tokenizer.chat_template is None:
            raise RenderError("the model has no chat template: it serves completions of raw prompts only")
        plain = [self._with_known_role(_with_plain_content(message)) for message in messages]
        try:
            ids = self._tokenizer.apply_chat_template(
                plain,
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                sanitize_control_tokens=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},
                **(variables or {}),
            )
        except TemplateError as error:
            raise RenderError(f"the model's chat template does not take these messages: {error}") from error
        except Exception as error:
            # A template is the model's code, and may raise anything, for example a TypeError on a missing
            # field.
            raise RenderError("the model's chat template does not take these messages") from error
        return tuple(ids)

    def encode_framed(self, text: str, *, in_template: bool) -> FramedText:
        """Return a text as ordinary text, as a user's message if it is to be in the model's template.

        Raises `RenderError` for a tokenizer that does not tell where its tokens come from.
        """
        _check_unicode(text)
        try:
            encoded = self._tokenizer(
                text,
                add_special_tokens=False,
                split_special_tokens=True,
                return_offsets_mapping=True,
                verbose=False,
            )
        except NotImplementedError as error:
            raise RenderError("the draft's tokenizer does not tell where its tokens come from") from error
        before, after = self._frame() if in_template else (self.with_special_tokens(()), ())
        return FramedText(
            (*before, *encoded["input_ids"], *after),
            len(before),
            tuple((first, last) for first, last in encoded["offset_mapping"]),
        )

    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that the template writes before and after a user's message."""
        try:
            written = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": _PLACE}], tokenize=False, add_generation_prompt=True
            )
            before, _, after = str(written).partition(_PLACE)
        except Exception:  # there is no template, or none that takes one message
            return self.with_special_tokens(()), ()
        return self.encode(before, add_special_tokens=False), self.encode(after, add_special_tokens=False)

    def encode_question(self, messages: Sequence[Mapping[str, Any]], max_chars: int) -> Question | None:
        """Return the last user message as ordinary text, up to a number of characters; None without one.

        Raises `RenderError`.
        """
        questions = [message for message in messages if message.get("role") == "user"]
        content = _with_plain_content(questions[-1]).get("content") if questions else None
        if not isinstance(content, str) or not content:
            return None

        def encode(text: str) -> tuple[int, ...]:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

        beginning = encode(content[:max_chars])
        return Question(beginning, encode(content[-max_chars:]) if len(content) > max_chars else beginning)

    def _with_known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message whose role `developer` is replaced by its older name, `system`, if the template
        lacks it.
        """
        template = str(self._tokenizer.chat_template)
        is_unknown = message.get("role") == "developer" and "developer" not in template
        return message | {"role": "system"} if is_unknown else message


def _template_text(template: str | Mapping[str, str] | None) -> str | None:
    """Return a template's text: of several, the one that transformers uses with tools."""
    if isinstance(template, Mapping):
        return template.get("tool_use") or template.get("default")
    return template


def _with_plain_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one string.

    Parts are joined before control tokens are searched, so that none can hide across the border of two parts.
    """
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(part["text"] for part in content)
        plain["content"] = content
    if isinstance(content, str):
        _check_unicode(content)
    return plain


def _check_unicode(text: str) -> None:
    """Raise `RenderError` for a lone surrogate, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RenderError(f"the text has half a surrogate pair at character {error.start}") from error
