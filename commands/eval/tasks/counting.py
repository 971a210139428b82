"""Aggregation: the most common words of a list and of a text (RULER's cwe and fwe, arXiv 2404.06654)."""

import random
from dataclasses import dataclass
from itertools import cycle, islice

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompt_parts
from commands.eval.tasks.fitting import fit
from commands.eval.tasks.values import plain_words

_COMMON_SHARE = 0.03  # of the list, for each common word; RULER has 30 in about 1,000
_MIN_REPEATS = 2  # of a common word
_OTHERS_RATIO = 10  # repeats of a common word for each repeat of another word
_ZETA_2 = 1.6449340668  # the sum of 1 / rank² over all ranks


@dataclass(frozen=True, slots=True)
class CommonWordsTask:
    """A numbered list in which `num_common` words occur about ten times as often as each other word."""

    name: str = "cwe"
    num_common: int = 10

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        words = rng.sample(plain_words(), len(plain_words()))
        seed = rng.getrandbits(64)

        def write(size: int) -> Case:
            listed = self._list_words(words, size)
            random.Random(seed).shuffle(listed)
            common = sorted(words[: self.num_common], key=listed.index)
            context = (
                "Below is a numbered list of words. Some of them stand in it far more often than others.\n\n"
                + " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
            )
            question = f"Which {self.num_common} words stand most often in the list above?"
            prefix = f"The {self.num_common} words that stand most often in the list are"
            parts = prompt_parts(context, question, prefix)
            return Case(self.name, *parts, f" {', '.join(common)}.", tuple(common), Scoring.ALL)

        return fit(write, num_tokens, count_tokens, min_size=3 * self.num_common)

    def _list_words(self, words: list[str], size: int) -> list[str]:
        """Return `size` words, not shuffled: the first `num_common` words repeated, then the others."""
        num_repeats = max(round(_COMMON_SHARE * size), _MIN_REPEATS)
        num_left = size - num_repeats * self.num_common
        # Few enough other words that each fills the rest with its share of repeats, or with one more.
        num_others = num_left // max(round(num_repeats / _OTHERS_RATIO), 1)
        others = words[self.num_common :][:num_others]
        return words[: self.num_common] * num_repeats + list(islice(cycle(others), num_left))


@dataclass(frozen=True, slots=True)
class FrequentWordsTask:
    """A text whose word of rank r has a frequency in proportion to 1 / r².

    The `num_queried` first are the answer.
    """

    name: str = "fwe"
    num_queried: int = 3

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        words = rng.sample(plain_words(), len(plain_words()))
        seed = rng.getrandbits(64)
        frequent = tuple(words[: self.num_queried])

        def write(size: int) -> Case:
            text = _zeta_words(words, size)
            random.Random(seed).shuffle(text)
            context = (
                "Below is a text of words in disorder. A few of them come far more often than the rest.\n\n"
                + " ".join(text)
            )
            question = f"Which {self.num_queried} words are the most frequent in the text above?"
            prefix = f"The {self.num_queried} most frequent words in the text are"
            parts = prompt_parts(context, question, prefix)
            return Case(self.name, *parts, f" {', '.join(frequent)}.", frequent, Scoring.ALL)

        return fit(write, num_tokens, count_tokens, min_size=8 * (self.num_queried + 1) ** 2)


def _zeta_words(words: list[str], size: int) -> list[str]:
    """Return `size` words with zeta-distributed frequencies, not shuffled."""
    text: list[str] = []
    num_frequent = 0
    for rank, word in enumerate(words, 1):
        num_repeats = int(size / (_ZETA_2 * rank**2))
        if num_repeats == 0:
            break
        text += [word] * num_repeats
        num_frequent = rank
    # The words too rare to occur once fill the positions that rounding leaves.
    return text + list(islice(cycle(words[num_frequent:]), size - len(text)))
