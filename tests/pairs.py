"""Cases that cover all pairs of parameters' values: a small part of the product of several parameters."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise_cases(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases in which each two values of different parameters occur together at least once.

    Each case is the one of the product that adds the most pairs.
    """
    product = list(itertools.product(*(range(len(values)) for values in parameters)))
    missing = {pair for case in product for pair in _pairs(case)}
    cases = []
    while missing:
        best = max(product, key=lambda case: len(missing.intersection(_pairs(case))))
        missing.difference_update(_pairs(best))
        cases.append(tuple(values[index] for values, index in zip(parameters, best, strict=True)))
    return cases


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), 2))
