"""`top_k`, `top_p` and `min_p` as one score threshold for each row.

With a threshold, tokens of equal score are kept or removed together. The result does not depend on the order
in which a device sorts equal scores.
"""

import torch
from torch import Tensor


def score_threshold(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the lowest score [row, 1] that can be drawn.

    `scores` is [row, token], after temperature. The others are [row]. The filters are applied in the order
    `top_k`, `top_p`, `min_p`, each to the tokens that the previous one kept. The values 0, 1 and 0 keep all.
    """
    ordered = scores.sort(dim=-1, descending=True).values
    num_tokens = scores.shape[-1]
    num_kept = torch.where(top_k > 0, top_k, num_tokens).clamp(max=num_tokens)
    kth = ordered.gather(1, num_kept[:, None] - 1)
    nucleus = _nucleus_threshold(ordered.masked_fill(ordered < kth, -torch.inf), top_p)
    return torch.maximum(torch.maximum(kth, nucleus), ordered[:, :1] + min_p[:, None].log())


def _nucleus_threshold(ordered: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest score of the nucleus, the fewest likeliest tokens with probability `top_p`.

    The nucleus has at least one token.
    """
    probabilities = ordered.softmax(dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(dim=-1) - probabilities
    is_inside = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    last = is_inside.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, last)
