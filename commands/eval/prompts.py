"""Prompts as token ids, with the position at which prefill ends and the slot is packed."""

from array import array
from dataclasses import dataclass, field
from itertools import takewhile

from backends.conversion import local_model
from backends.errors import ModelLoadError
from commands.eval.errors import EvalError
from commands.eval.options import Pack
from commands.eval.tasks.case import Case, Task
from commands.eval.tasks.suite import case_source
from server.text.tokenizer import Tokenizer

# The length limit of an answer, relative to the perfect answer: a model may use other words.
_MAX_LENGTH_RATIO = 1.5
_EXTRA_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, the number of them that prefill reads, and the limit of the answer's tokens.

    `question` is the last message of a chat whose template is in the token ids. A server that renders chats
    knows it.
    """

    token_ids: "array[int]"
    num_prefill_tokens: int
    max_tokens: int
    question: str | None = field(default=None, kw_only=True)

    @property
    def num_decoded(self) -> int:
        """The largest number of tokens that decode reads: the rest of the prompt, and the answer."""
        return len(self.token_ids) - self.num_prefill_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Prompt(TokenPrompt):
    """The prompt of a case."""

    case: Case


class PromptWriter:
    """Writes a task's cases as prompts of `length` tokens, including special tokens and the chat template."""

    def __init__(self, tokenizer: Tokenizer, length: int, pack: Pack, *, uses_chat_template: bool) -> None:
        self._tokenizer = tokenizer
        self._pack = pack
        self._uses_chat_template = uses_chat_template
        self._num_case_tokens = length - len(self._encode("", ""))

    def write(self, task: Task, seed: int, index: int) -> Prompt:
        """Return a prompt. Raises `LengthError` for a length too short for the task."""
        case = task.make(case_source(task.name, seed, index), self._num_case_tokens, self._count)
        token_ids = self._encode(case.context + case.question, case.answer_prefix)
        prefilled = case.context if self._pack is Pack.BEFORE_QUESTION else case.context + case.question
        max_tokens = int(_MAX_LENGTH_RATIO * self._count(case.answer)) + _EXTRA_TOKENS
        # Decode reads at least one token of the prompt: the token that prefill itself samples has not been
        # read from the packed slot.
        num_prefill_tokens = min(num_common(token_ids, self._encode(prefilled, "")), len(token_ids) - 1)
        # A question that is unknown when the slot is packed must not help to pack it.
        is_known = self._uses_chat_template and self._pack is Pack.BEFORE_ANSWER
        question = case.context + case.question if is_known else None
        return Prompt(array("i", token_ids), num_prefill_tokens, max_tokens, case, question=question)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode(self, user_text: str, answer_prefix: str) -> tuple[int, ...]:
        """Return the ids of the user's text and of the answer's first words."""
        if not self._uses_chat_template:
            return self._tokenizer.encode(user_text + answer_prefix, add_special_tokens=True)
        messages = [{"role": "user", "content": user_text}]
        chat = self._tokenizer.render_chat(messages, add_generation_prompt=True, continue_final_message=False)
        return (*chat, *self._tokenizer.encode(answer_prefix, add_special_tokens=False))


def load_tokenizer(model: str) -> Tokenizer:
    """Read the tokenizer of a folder, hub id or GGUF file. Raises `EvalError`."""
    try:
        return Tokenizer.load(local_model(model))
    except (OSError, ValueError, KeyError, ModelLoadError) as error:
        raise EvalError(f"the tokenizer of {model} cannot be read: {error}") from error


def num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
