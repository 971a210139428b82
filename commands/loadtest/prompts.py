"""Prompts of a load: random token ids, random words of about as many tokens, or a file's. It knows no server and no tokenizer."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from commands.loadtest.config import Load
from server.options.command_line import OptionError

FIRST_TOKEN_ID = 256  # below it many vocabularies keep control tokens and single bytes

# Short and frequent: most vocabularies have each as one token.
_WORDS = (
    "the", "of", "and", "to", "in", "is", "it", "for", "on", "as", "with", "at", "by", "from", "this", "be", "are", "was", "that",
    "not", "have", "has", "had", "they", "you", "we", "his", "her", "which", "one", "all", "will", "there", "can", "their", "more",
    "when", "some", "time", "other", "into", "first", "only", "new", "most", "over", "also", "after", "used", "two", "may", "work",
    "life", "day", "way", "year", "part", "long", "great", "little", "good", "man", "world", "still", "own", "see", "him", "how",
    "well", "back", "through", "just", "because", "much", "before", "right", "too",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or token ids, and the most tokens of its answer."""

    content: str | tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class WordScale:
    """How many tokens a server counts for random words: `overhead` (its template, say) and so many for each word."""

    overhead: float = 0.0
    tokens_per_word: float = 1.0

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int]) -> "WordScale":
        """Return the straight line through two measurements of (words, tokens)."""
        tokens_per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(few[1] - tokens_per_word * few[0], tokens_per_word)

    def num_words(self, num_tokens: int) -> int:
        return max(round((num_tokens - self.overhead) / self.tokens_per_word), 1)


Form: TypeAlias = WordScale | None
"""How random prompts are sent: as words on this scale, or (None) as token ids."""


def make_prompts(load: Load, form: Form, seed: str, count: int) -> list[Prompt]:
    """Return `count` prompts, the same for the same seed. Raises `OptionError` for a file that cannot be used."""
    if load.dataset_path is not None:
        texts = read_texts(load.dataset_path)
        random.Random(seed).shuffle(texts)
        return [Prompt(texts[index % len(texts)], load.output_len) for index in range(count)]
    return [_random_prompt(load, form, random.Random(f"{seed}/{index}")) for index in range(count)]


def random_words(count: int, source: random.Random) -> str:
    return " ".join(source.choices(_WORDS, k=count))


def random_token_ids(count: int, vocab_size: int, source: random.Random) -> tuple[int, ...]:
    return tuple(source.choices(range(FIRST_TOKEN_ID, vocab_size), k=count))


def read_texts(path: Path) -> list[str]:
    """Return the prompts of a file. Raises `OptionError`."""
    try:
        lines = [
            (number, line) for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--dataset-path {path} cannot be read: {error}") from error
    texts = [
        _prompt_of(line, f"{path}, line {number}") if path.suffix == ".jsonl" else line
        for number, line in lines
    ]
    if not texts:
        raise OptionError(f"--dataset-path {path} has no prompt")
    return texts


def _random_prompt(load: Load, form: Form, source: random.Random) -> Prompt:
    num_tokens, max_tokens = (
        _vary(length, load.range_ratio, source) for length in (load.input_len, load.output_len)
    )
    if form is None:
        return Prompt(random_token_ids(num_tokens, load.vocab_size, source), max_tokens)
    return Prompt(random_words(form.num_words(num_tokens), source), max_tokens)


def _vary(length: int, ratio: float, source: random.Random) -> int:
    return source.randint(max(round(length * (1 - ratio)), 1), round(length * (1 + ratio)))


def _prompt_of(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise OptionError(f"--dataset-path {place}: not an object with a text `prompt`")
    return prompt
