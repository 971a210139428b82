"""How important the chunks of a prompt are, from the attention that its queries pay to each token.

(SpecPrefill, arXiv 2502.02789: attention is pooled along the prompt, then the largest of all layers and heads
counts, then the mean of each chunk.) The attention is that of `cache.scoring.window_votes`.
"""

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

POOLING_SIZE = 13


def token_importance(votes: Iterable[Tensor]) -> Tensor:
    """Return the importance of each token, float32 [token], from each layer's votes [head, token].

    There are zeros beyond the prompt's ends, as in the authors' code.
    """
    pooled = (
        functional.avg_pool1d(layer[None], POOLING_SIZE, stride=1, padding=POOLING_SIZE // 2)[0].amax(0)
        for layer in votes
    )
    return reduce(torch.maximum, pooled)


def chunk_means(importance: Tensor, chunk_tokens: int) -> Tensor:
    """Return the mean of each `chunk_tokens` tokens, [chunk]. The last chunk may be shorter."""
    return functional.avg_pool1d(importance[None], chunk_tokens, stride=chunk_tokens, ceil_mode=True)[0]
