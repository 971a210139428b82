"""Serve a model whose policy sparse chooses worse on purpose: a control for measurements of that policy.

Groups of eight neighbouring tokens are chosen by the mean of their keys (landmarks, as ShadowKV has them,
arXiv 2410.21465), instead of each token by its own key. A measurement that shows no loss here cannot show
one. The score of a mean of keys is the mean of their scores. Decode runs uncompiled, since the kernel has its
own choice.

Usage: `python -m bench.sparse_control --policy sparse …`, with the options of `snapserve serve`.
"""

import sys

from torch import Tensor
from torch.nn.functional import pad

from backends.torch_backend.model import sparse_attention
from commands.cli import main

GROUP = 8


def group_strengths(scores: Tensor) -> Tensor:
    """Return the strength of each token's group, [row, kv_head, token]: see `sparse_attention.strengths`."""
    num_tokens = scores.shape[3]
    padded = pad(scores, (0, -num_tokens % GROUP))
    means = padded.view(*scores.shape[:3], -1, GROUP).mean(dim=4)
    strengths = means.log_softmax(dim=-1).amax(dim=2)
    return strengths.repeat_interleave(GROUP, dim=2)[:, :, :num_tokens]


if __name__ == "__main__":
    sparse_attention.strengths = group_strengths
    sys.exit(main(["serve", "--no-compile", *sys.argv[1:]]))
