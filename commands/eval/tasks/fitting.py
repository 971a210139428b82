"""Find the size of a case whose prompt has a given number of tokens, with few token counts.

Counting the tokens of a long text is slow. The search extrapolates along a straight line within a bracket
that narrows with each count.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from commands.eval.tasks.case import LengthError

T = TypeVar("T")


class Sized(Protocol):
    """A case of some size."""

    @property
    def task(self) -> str: ...
    @property
    def prompt(self) -> Any: ...


Draft = TypeVar("Draft", bound=Sized)

_PROBE = 8  # units by which the second case is larger than the smallest
_MAX_GROWTH = 8  # a slope is extrapolated to at most this multiple of the size that it was measured over
_MIN_SLOPE = 0.1  # tokens per unit
_TOLERANCE = 0.004  # share of the length that may remain unused


class Supply(Generic[T]):
    """Remembers the items of an endless iterator, so that every size of a case begins with the same items."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._items: list[T] = []

    def first(self, count: int) -> list[T]:
        """Return the first `count` items."""
        self._items += islice(self._source, max(count - len(self._items), 0))
        return self._items[:count]


def fit(
    write: Callable[[int], Draft], num_tokens: int, count_tokens: Callable[[Any], int], min_size: int = 0
) -> Draft:
    """Return `write(size)` for nearly the largest size whose prompt has at most `num_tokens` tokens.

    `count_tokens` returns the tokens of a case's `prompt`. They must grow with the size, from `min_size` on.
    Raises `LengthError` if even `min_size` is too long.
    """
    best = write(min_size)
    min_tokens = count_tokens(best.prompt)
    if min_tokens > num_tokens:
        raise LengthError(f"{best.task} needs at least {min_tokens} tokens, got num_tokens {num_tokens}")
    # The bracket: `low` is the largest size known to fit, `high` the smallest known to be too large.
    low = min_size
    low_tokens = min_tokens
    high: int | None = None
    size = min_size + _PROBE
    while high is None or high - low > 1:
        case = write(size)
        tokens = count_tokens(case.prompt)
        slope = max((tokens - min_tokens) / (size - min_size), _MIN_SLOPE)
        if tokens > num_tokens:
            high = size
        else:
            best = case
            low = size
            low_tokens = tokens
            if num_tokens - tokens < max(slope, _TOLERANCE * num_tokens):
                break
        step = max(int((num_tokens - low_tokens) / slope), 1)
        size = low + min(step, _MAX_GROWTH * (size - min_size))
        if high is not None and size >= high:
            # The line overshoots. A little below `high` narrows the bracket even where texts are not linear.
            size = high - 1 - (high - low) // 50
    return best
