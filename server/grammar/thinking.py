"""A limit of an answer's reasoning: once it is spent, the tokens of the end tag are the only ones allowed.

The tags are found in the text, since a model can spell them with other tokens than the tokenizer does. Other
rules for the answer apply beside the limit.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from scheduler.constraints import Allowed, Matcher
from server.text.vocabulary import Vocabulary

_KEY: Final = "thinking_budget"
_SPACE = b" \t\r\n"
_UNLIMITED = 1 << 30  # tokens


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tags of a model's reasoning. `is_open` says that the prompt ends with `start`."""

    start: str
    end: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens of reasoning, and the grammar of the answer if it has one."""

    num_tokens: int
    thinking: Thinking
    end_token_ids: Sequence[int]  # of the end tag
    grammar: str | None

    def text(self) -> str:
        """Return this as a grammar's text."""
        return json.dumps({_KEY: asdict(self)})

    @classmethod
    def parse(cls, text: str) -> "ThinkingBudget | None":
        """Return the limit of a text, or None if it is another grammar."""
        if not text.startswith(f'{{"{_KEY}"'):
            return None
        fields = json.loads(text)[_KEY]
        return cls(**{**fields, "thinking": Thinking(**fields["thinking"])})


class ThinkingMatcher:
    """The state of one answer under a limit: a `scheduler.constraints.Matcher`.

    `answer` is the matcher of the answer's grammar. Where it does not allow the end tag, as within a
    character, the limit waits for it.
    """

    def __init__(self, budget: ThinkingBudget, answer: Matcher | None, vocabulary: Vocabulary) -> None:
        self._answer = answer
        self._vocabulary = vocabulary
        self._all = b"\xff" * (-(-len(vocabulary) // 8))
        self._start = budget.thinking.start.encode()
        self._end = budget.thinking.end.encode()
        self._end_token_ids = budget.end_token_ids
        self._num_left = budget.num_tokens
        self._num_forced = 0  # tokens of the end tag
        self._text = b""  # of the answer's start, then of the reasoning's end
        self._has_begun = self._is_open = budget.thinking.is_open

    def allowed(self) -> Allowed:
        if self._answer is not None:
            allowed = self._answer.allowed()
        else:
            allowed = Allowed(self._all, may_end=True, num_free=self._num_free)
        if not self._is_open or self._num_left > 0:
            return allowed
        token_id = self._end_token_ids[self._num_forced]
        index, bit = token_id // 8, 1 << token_id % 8
        if not allowed.mask[index] & bit:
            return allowed
        mask = bytearray(len(allowed.mask))
        mask[index] = bit
        return Allowed(bytes(mask), may_end=False)

    def advance(self, token_id: int) -> None:
        if self._answer is not None:
            self._answer.advance(token_id)
        if self._has_begun and not self._is_open:
            return
        self._text += self._vocabulary.token_bytes(token_id)
        if not self._has_begun:
            self._read_start()
            return
        is_forced = self._num_left <= 0 and token_id == self._end_token_ids[self._num_forced]
        self._num_forced = self._num_forced + 1 if is_forced else 0
        self._num_left -= 1
        _, end, rest = self._text.partition(self._end)
        if not end and self._num_forced < len(self._end_token_ids):
            self._text = self._text[-len(self._end) :]
            return
        # Behind a channel's end, another channel may hold more reasoning.
        self._num_forced, self._is_open, self._has_begun, self._text = 0, False, False, rest
        self._read_start()

    @property
    def _num_free(self) -> int:
        """The least number of tokens until the end can have to be forced."""
        if self._has_begun and not self._is_open:
            return _UNLIMITED
        return max(self._num_left, 1)  # the start tag is a token at least

    def _read_start(self) -> None:
        begun = self._text.lstrip(_SPACE)
        if begun != self._start and self._start.startswith(begun):
            return
        self._has_begun = True
        self._is_open = begun.startswith(self._start)
        self._text = begun[len(self._start) :]
