"""Cases as token ids: the same for every policy, and where in them prefill ends."""

from array import array
from dataclasses import dataclass
from itertools import takewhile

from commands.eval.errors import EvalError
from commands.eval.options import Pack
from commands.eval.tasks.case import Case, Task
from commands.eval.tasks.suite import case_source
from server.text.tokenizer import Tokenizer

_SLACK = (
    1.5  # an answer may be so many times as long as the perfect one, for models that say it in other words
)
_MORE = 8


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, how many of them prefill reads, and the most tokens of the answer."""

    token_ids: "array[int]"
    num_prefill_tokens: int
    max_tokens: int

    @property
    def num_decoded(self) -> int:
        """The most tokens that decode takes: the rest of the prompt, and the answer."""
        return len(self.token_ids) - self.num_prefill_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Prompt(TokenPrompt):
    """What is asked of a model for a case."""

    case: Case


class PromptWriter:
    """Writes a task's cases so that prompts have `length` tokens, special ones and those of a chat template included."""

    def __init__(self, tokenizer: Tokenizer, length: int, pack: Pack, *, uses_chat_template: bool) -> None:
        self._tokenizer, self._pack, self._uses_chat_template = tokenizer, pack, uses_chat_template
        self._room = length - len(self._encode("", ""))

    def write(self, task: Task, seed: int, index: int) -> Prompt:
        """Return a prompt. Raises `LengthError` for a length too short for the task."""
        case = task.make(case_source(task.name, seed, index), self._room, self._count)
        token_ids = self._encode(case.context + case.question, case.answer_prefix)
        read = case.context if self._pack is Pack.BEFORE_QUESTION else case.context + case.question
        max_tokens = int(_SLACK * self._count(case.answer)) + _MORE
        # Decode gets one token of the prompt at least: what prefill itself chooses has not seen the slot.
        num_prefill_tokens = min(_num_common(token_ids, self._encode(read, "")), len(token_ids) - 1)
        return Prompt(array("i", token_ids), num_prefill_tokens, max_tokens, case)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode(self, asked: str, answer_prefix: str) -> tuple[int, ...]:
        """Return the ids of what is asked and of the answer's first words."""
        if not self._uses_chat_template:
            return self._tokenizer.encode(asked + answer_prefix, add_special_tokens=True)
        chat = self._tokenizer.render_chat(
            [{"role": "user", "content": asked}], add_generation_prompt=True, continue_final_message=False
        )
        return (*chat, *self._tokenizer.encode(answer_prefix, add_special_tokens=False))


def load_tokenizer(model: str) -> Tokenizer:
    """Read a tokenizer. Raises `EvalError`."""
    try:
        return Tokenizer.load(model)
    except (OSError, ValueError, KeyError) as error:
        raise EvalError(f"the tokenizer of {model} cannot be read: {error}") from error


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many ids two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
