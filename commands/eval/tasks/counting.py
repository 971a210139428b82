"""Aggregation: the most common words of a list, the most frequent words of a text (RULER's cwe and fwe)."""

import random
from dataclasses import dataclass

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompted
from commands.eval.tasks.fitting import fit
from commands.eval.tasks.values import plain_words

_COMMON_SHARE = 0.03  # of a list is each common word; RULER's 30 of about 1,000
_LEAST_COMMON = 2
_ZETA_2 = 1.6449340668  # the sum of 1 / rank²


@dataclass(frozen=True, slots=True)
class CommonWordsTask:
    """A numbered list in which `num_common` words stand about ten times as often as each of the others."""

    name: str = "cwe"
    num_common: int = 10

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        words = rng.sample(plain_words(), len(plain_words()))
        seed = rng.getrandbits(64)

        def write(size: int) -> Case:
            listed = self._listed(words, size)
            random.Random(seed).shuffle(listed)
            common = sorted(words[: self.num_common], key=listed.index)
            context = (
                "Below is a numbered list of words. Some of them stand in it far more often than others.\n\n"
                + " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
            )
            question = f"Which {self.num_common} words stand most often in the list above?"
            parts = prompted(
                context, question, f"The {self.num_common} words that stand most often in the list are"
            )
            return Case(self.name, *parts, f" {', '.join(common)}.", tuple(common), Scoring.ALL)

        return fit(write, num_tokens, count_tokens, least=3 * self.num_common)

    def _listed(self, words: list[str], size: int) -> list[str]:
        """Return `size` words in no order of meaning."""
        times = max(round(_COMMON_SHARE * size), _LEAST_COMMON)
        others, rest = words[self.num_common :], size - times * self.num_common
        others = others[
            : rest // max(round(times / 10), 1)
        ]  # so many, that each stands so often, or once more
        return words[: self.num_common] * times + [others[place % len(others)] for place in range(rest)]


@dataclass(frozen=True, slots=True)
class FrequentWordsTask:
    """A text whose word of rank r stands as often as 1 / r² says; the first `num_asked` are asked for."""

    name: str = "fwe"
    num_asked: int = 3

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        words = rng.sample(plain_words(), len(plain_words()))
        seed = rng.getrandbits(64)
        frequent = tuple(words[: self.num_asked])

        def write(size: int) -> Case:
            text = _zeta(words, size)
            random.Random(seed).shuffle(text)
            context = f"Below is a text of words in disorder. A few of them come far more often than the rest.\n\n{' '.join(text)}"
            question = f"Which {self.num_asked} words are the most frequent in the text above?"
            parts = prompted(context, question, f"The {self.num_asked} most frequent words in the text are")
            return Case(self.name, *parts, f" {', '.join(frequent)}.", frequent, Scoring.ALL)

        return fit(write, num_tokens, count_tokens, least=8 * (self.num_asked + 1) ** 2)


def _zeta(words: list[str], size: int) -> list[str]:
    """Return `size` words; those too rare to come once share what rounding leaves."""
    text: list[str] = []
    for rank, word in enumerate(words, 1):
        times = int(size / (_ZETA_2 * rank**2))
        if times == 0:
            break
        text += [word] * times
    rare = words[len(set(text)) :]
    return text + [rare[place % len(rare)] for place in range(size - len(text))]
