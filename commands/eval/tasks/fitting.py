"""Finding how much must be written for a text to have so many tokens, with few counts: a straight line first, then a narrowing bracket."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from commands.eval.tasks.case import Case, LengthError, TokenCounter

T = TypeVar("T")

_PROBE = 8  # units by which the second text is longer than the shortest
_TRUST = 8
_LEAST_SLOPE = 0.1  # tokens a unit
_TOLERANCE = 0.004  # of a length need not be reached


class Supply(Generic[T]):
    """An endless source whose first items stay the same, however many are taken."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._taken: list[T] = []

    def first(self, count: int) -> list[T]:
        self._taken += islice(self._source, max(count - len(self._taken), 0))
        return self._taken[:count]


def fit(write: Callable[[int], Case], num_tokens: int, count_tokens: TokenCounter, least: int = 0) -> Case:
    """Return `write(size)` for the greatest size from `least` on, or almost, whose prompt has at most `num_tokens` tokens.

    A longer prompt is expected of a greater size. Raises `LengthError` when even the least is too long.
    """
    low, best = least, write(least)
    low_tokens = least_tokens = count_tokens(best.prompt)
    if least_tokens > num_tokens:
        raise LengthError(f"{best.task} needs at least {least_tokens} tokens, got num_tokens {num_tokens}")
    high: int | None = None  # the least size known to be too long
    size = least + _PROBE
    while high is None or high - low > 1:
        case = write(size)
        tokens = count_tokens(case.prompt)
        slope = max((tokens - least_tokens) / (size - least), _LEAST_SLOPE)
        if tokens > num_tokens:
            high = size
        else:
            low, low_tokens, best = size, tokens, case
            if num_tokens - tokens < max(slope, _TOLERANCE * num_tokens):
                break
        step = max(int((num_tokens - low_tokens) / slope), 1)
        # A slope is trusted for a few times the size that it was measured over.
        size = low + min(step, _TRUST * (size - least))
        if high is not None and size >= high:
            size = high - 1 - (high - low) // 50
    return best
