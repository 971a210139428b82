"""Prompts of a load: random token ids, random words, or lines of a file.

It knows no server and no tokenizer.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from commands.loadtest.config import DatasetName, Load
from server.options.command_line import OptionError

FIRST_TOKEN_ID = 256  # below it many vocabularies keep control tokens and single bytes

# Short and frequent: most vocabularies have each as one token.
_WORDS = (
    "the", "of", "and", "to", "in", "is", "it", "for", "on", "as", "with", "at", "by", "from", "this", "be",
    "are", "was", "that", "not", "have", "has", "had", "they", "you", "we", "his", "her", "which", "one",
    "all", "will", "there", "can", "their", "more", "when", "some", "time", "other", "into", "first", "only",
    "new", "most", "over", "also", "after", "used", "two", "may", "work", "life", "day", "way", "year",
    "part", "long", "great", "little", "good", "man", "world", "still", "own", "see", "him", "how", "well",
    "back", "through", "just", "because", "much", "before", "right", "too",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or token ids, and the largest number of tokens of its answer."""

    content: str | tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class WordScale:
    """The tokens that a server counts for random words: a fixed overhead and a number for each word.

    The overhead may be a chat template.
    """

    overhead: float = 0.0
    tokens_per_word: float = 1.0

    @classmethod
    def through(cls, first: tuple[int, int], second: tuple[int, int]) -> "WordScale":
        """Return the straight line through two measurements of (words, tokens)."""
        tokens_per_word = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - tokens_per_word * first[0], tokens_per_word)

    def num_words(self, num_tokens: int) -> int:
        return max(round((num_tokens - self.overhead) / self.tokens_per_word), 1)


Form: TypeAlias = WordScale | None
"""The form of random prompts: words on this scale, or token ids (None)."""


def make_prompts(load: Load, form: Form, seed: str, count: int) -> list[Prompt]:
    """Return `count` prompts, the same for the same seed. A file with fewer prompts is repeated.

    Raises `OptionError` for a file without usable prompts.
    """
    if load.dataset_path is not None:
        texts = read_texts(load.dataset_path)
        random.Random(seed).shuffle(texts)
        return [Prompt(texts[index % len(texts)], load.output_len) for index in range(count)]
    if load.dataset_name is DatasetName.PREFIX_REPETITION:
        return _repetitions(load, form, seed, count)
    return [_random_prompt(load, form, random.Random(f"{seed}/{index}")) for index in range(count)]


def _repetitions(load: Load, form: Form, seed: str, count: int) -> list[Prompt]:
    """Return prompts of `num_prefixes` groups, in random order; those of a group have the same beginning.

    As in vLLM, groups are equal, but none of the `count` prompts is left out if they cannot be.
    """
    prefixes = [
        _random_content(load.repeated_len, load, form, random.Random(f"{seed}/prefix {index}"))
        for index in range(load.num_prefixes)
    ]
    suffixes = [
        _random_content(load.suffix_len, load, form, random.Random(f"{seed}/{index}"), is_whole=False)
        for index in range(count)
    ]
    contents = [_joined(prefixes[index % len(prefixes)], suffix) for index, suffix in enumerate(suffixes)]
    random.Random(seed).shuffle(contents)
    return [Prompt(content, load.repetition_output_len) for content in contents]


def _random_content(
    num_tokens: int, load: Load, form: Form, source: random.Random, *, is_whole: bool = True
) -> str | tuple[int, ...]:
    """Return random content; one that is not a whole prompt has no overhead of its own."""
    if form is None:
        return random_token_ids(num_tokens, load.vocab_size, source)
    scale = form if is_whole else WordScale(0.0, form.tokens_per_word)
    return random_words(scale.num_words(num_tokens), source)


def _joined(prefix: str | tuple[int, ...], suffix: str | tuple[int, ...]) -> str | tuple[int, ...]:
    if isinstance(prefix, str):
        return f"{prefix} {suffix}"
    return (*prefix, *suffix)


def random_words(count: int, source: random.Random) -> str:
    return " ".join(source.choices(_WORDS, k=count))


def random_token_ids(count: int, vocab_size: int, source: random.Random) -> tuple[int, ...]:
    return tuple(source.choices(range(FIRST_TOKEN_ID, vocab_size), k=count))


def read_texts(path: Path) -> list[str]:
    """Return the prompts of a file, one for each line that is not blank. Raises `OptionError`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--dataset-path {path} cannot be read: {error}") from error
    texts = [
        _prompt_of(line, f"{path}, line {line_number}") if path.suffix == ".jsonl" else line
        for line_number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not texts:
        raise OptionError(f"--dataset-path {path} has no prompt")
    return texts


def _random_prompt(load: Load, form: Form, source: random.Random) -> Prompt:
    num_tokens = _vary(load.input_len, load.range_ratio, source)
    max_tokens = _vary(load.output_len, load.range_ratio, source)
    return Prompt(_random_content(num_tokens, load, form, source), max_tokens)


def _vary(length: int, ratio: float, source: random.Random) -> int:
    return source.randint(max(round(length * (1 - ratio)), 1), round(length * (1 + ratio)))


def _prompt_of(line: str, location: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise OptionError(f"--dataset-path {location}: not an object with a text `prompt`")
    return prompt
