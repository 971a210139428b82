"""How the kept entries of all layers are shared out between them, in integers: the layers that look things up get more than the others.

Sizes are fixed when the slots are allocated, so what differs between layers stays static, and all layers together hold no more than equal
shares would. What makes a layer's score is no business of this module.
"""

from collections.abc import Sequence

_UNITS = 4  # a layer's equal share is so many units: no layer gets less than one, and scores that differ by little change nothing
_SCORE_OF_ANY = (
    0.1  # what a layer counts that looks nothing up: what it holds may serve other ends than look-up
)


def share_kept(num_kept: int, scores: Sequence[float], most: int) -> tuple[int, ...]:
    """Return each layer's kept entries, at most `most` of them and on the average at most `num_kept`.

    `scores`, from 0 to 1, are shares of each layer's attention that look things up. Whole units go to one layer after another, always to
    the one whose units are the fewest for its score.
    """
    weights = [score + _SCORE_OF_ANY for score in scores]
    units = [1] * len(weights)
    limit = max(most * _UNITS // max(num_kept, 1), _UNITS)
    for _ in range((_UNITS - 1) * len(weights)):
        open_layers = [layer for layer, own in enumerate(units) if own < limit]
        units[min(open_layers, key=lambda layer: (units[layer] + 0.5) / weights[layer])] += 1
    return tuple(own * num_kept // _UNITS for own in units)
