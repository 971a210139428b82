"""How kept entries are shared out between layers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cache.budgets import share_kept

# Rounded, because smaller differences are lost in a sum.
SCORES = st.lists(st.floats(0, 1).map(lambda score: round(score, 6)), min_size=1, max_size=12)


@given(st.integers(0, 4000), SCORES, st.integers(0, 20_000))
def test_shares_stay_within_the_total_and_their_limits(num_kept: int, scores: list[float], most: int) -> None:
    shares = share_kept(num_kept, scores, most)
    assert len(shares) == len(scores)
    assert sum(shares) <= num_kept * len(scores) < sum(shares) + len(scores)  # rounding alone is lost
    assert min(shares) >= num_kept // 4
    assert max(shares) <= max(most, num_kept)


@given(st.integers(0, 4000), SCORES)
def test_a_higher_score_does_not_get_a_smaller_share(num_kept: int, scores: list[float]) -> None:
    by_score = sorted(zip(scores, share_kept(num_kept, scores, 100_000), strict=True))
    for (low, less), (high, more) in pairwise(by_score):
        assert less <= more or low == high


@given(st.integers(0, 4000), st.floats(0, 1), st.integers(1, 80), st.integers(0, 20_000))
def test_equal_scores_are_equal_shares(num_kept: int, score: float, num_layers: int, most: int) -> None:
    assert share_kept(num_kept, [score] * num_layers, most) == (num_kept,) * num_layers


def test_the_only_scored_layer_gets_the_entries_of_the_others() -> None:
    assert share_kept(400, [0.0, 1.0, 0.0], 10_000) == (100, 1000, 100)
    assert share_kept(400, [0.0, 1.0, 0.0], 800) == (200, 800, 200)
    assert share_kept(400, [0.01, 0.02, 0.0], 10_000) == (400, 400, 400)
