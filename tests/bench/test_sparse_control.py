"""The control of policy sparse: groups of eight, scored by their means."""

import torch

from bench.sparse_control import GROUP, group_strengths


def test_tokens_have_the_strength_of_their_groups_mean() -> None:
    scores = torch.randn(2, 3, 2, 3 * GROUP)
    means = scores.unfold(3, GROUP, GROUP).mean(-1)
    expected = means.softmax(-1).amax(2).log()
    found = group_strengths(scores)
    assert found.shape == (2, 3, 3 * GROUP)
    for token in range(3 * GROUP):
        assert torch.allclose(found[:, :, token], expected[:, :, token // GROUP], atol=1e-5)
    assert group_strengths(scores[..., :-3]).shape == (2, 3, 3 * GROUP - 3)
