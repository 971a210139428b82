"""How the kept entries of all layers are shared out, in integers: layers that retrieve more get more of them.

Sizes are fixed when the slots are allocated, so that all shapes stay static. All layers together hold no more
than equal shares would. Where the scores come from is not known here.
"""

from collections.abc import Sequence

# Units of an equal share. Entries are shared out in whole units: no layer gets less than one, and scores that
# differ by little change nothing.
_UNITS = 4
# Added to every score: retrieval is not all that a layer's entries are for.
_BASE_SCORE = 0.1


def share_kept(num_kept: int, scores: Sequence[float], most: int) -> tuple[int, ...]:
    """Return each layer's kept entries, at most `most` of them and on average at most `num_kept`.

    `scores`, from 0 to 1, are the shares of each layer's attention that retrieve something.
    """
    weights = [score + _BASE_SCORE for score in scores]
    units = [1] * len(weights)
    limit = max(most * _UNITS // max(num_kept, 1), _UNITS)
    for _ in range((_UNITS - 1) * len(weights)):
        # Webster's method (Sainte-Laguë): the next unit goes to the layer with the fewest units, plus 1/2,
        # for its weight.
        open_layers = [layer for layer, num_units in enumerate(units) if num_units < limit]
        units[min(open_layers, key=lambda layer: (units[layer] + 0.5) / weights[layer])] += 1
    return tuple(num_units * num_kept // _UNITS for num_units in units)
