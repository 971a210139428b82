"""The window scorer against loops over Python numbers, and against torch's own attention."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import add, mul

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cache.scorer import HeadReduction, Pooling, QueryReduction, SoftmaxDomain, WindowScorer
from cache.scoring import candidate_scores, join_votes, select, window_votes

WIDTH, SCALE = 4, 0.7


@dataclass(frozen=True)
class Prompt:
    """A prompt's queries [head, token, width], its keys [kv_head, token, width], and its candidates'
    borders.
    """

    query: Tensor
    key: Tensor
    num_sink: int
    window_start: int

    @property
    def length(self) -> int:
        return self.key.shape[1]


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    num_kv_heads, group, length = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 24))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    query = 2 * torch.randn(num_kv_heads * group, length, WIDTH, generator=generator)
    key = 2 * torch.randn(num_kv_heads, length, WIDTH, generator=generator)
    num_sink = draw(st.integers(0, 3))
    return Prompt(query, key, num_sink, draw(st.integers(num_sink, max(num_sink, length))))


def scorers() -> st.SearchStrategy[WindowScorer]:
    """Return scorers with all options that concern votes."""
    return st.builds(
        WindowScorer,
        observation_window=st.integers(1, 8),
        observation_half_life=st.sampled_from([0, 1, 3]),
        softmax_domain=st.sampled_from(SoftmaxDomain),
        query_reduction=st.sampled_from(QueryReduction),
    )


def votes_of(
    scorer: WindowScorer,
    prompt: Prompt,
    softcap: float | None = None,
    *,
    index: Tensor | None = None,
    window_start: Tensor | None = None,
    length: Tensor | int | None = None,
) -> Tensor:
    """Return the votes of a prompt that is read in one piece, or of the chunk of its queries at `index`."""
    return window_votes(
        scorer,
        prompt.query,
        prompt.key,
        torch.arange(prompt.length) if index is None else index,
        scale=SCALE,
        num_sink=prompt.num_sink,
        candidates_end=prompt.window_start if window_start is None else window_start,
        num_prompt_tokens=prompt.length if length is None else length,
        softcap=softcap,
    )


def plain_softmax(logits: Sequence[float]) -> list[float]:
    exponentials = [math.exp(logit - max(logits)) for logit in logits]
    return [exponential / sum(exponentials) for exponential in exponentials]


def plain_votes(scorer: WindowScorer, prompt: Prompt, softcap: float | None) -> list[list[float]]:
    query, key = prompt.query.double().tolist(), prompt.key.double().tolist()
    group = len(query) // len(key)
    join: Callable[[float, float], float] = add if scorer.query_reduction is QueryReduction.SUM else max
    votes = [[0.0] * prompt.length for _ in query]
    for head, token in itertools.product(
        range(len(query)), range(prompt.length)[-scorer.observation_window :]
    ):
        seen = list(range(token + 1))
        if scorer.softmax_domain is SoftmaxDomain.CANDIDATES:
            seen = [index for index in seen if prompt.num_sink <= index < prompt.window_start]
        if not seen:
            continue
        logits = [SCALE * sum(map(mul, query[head][token], key[head // group][index])) for index in seen]
        if softcap is not None:
            logits = [softcap * math.tanh(logit / softcap) for logit in logits]
        distance = prompt.length - 1 - token
        strength = 0.5 ** (distance / scorer.observation_half_life) if scorer.observation_half_life else 1.0
        for index, weight in zip(seen, plain_softmax(logits), strict=True):
            votes[head][index] = join(votes[head][index], strength * weight)
    return votes


@given(prompts(), scorers(), st.none() | st.just(1.5))
@settings(deadline=None)
def test_votes_equal_plain_loops(prompt: Prompt, scorer: WindowScorer, softcap: float | None) -> None:
    votes = votes_of(scorer, prompt, softcap)
    assert votes.dtype == torch.float32
    torch.testing.assert_close(
        votes.double(),
        torch.tensor(plain_votes(scorer, prompt, softcap), dtype=torch.float64),
        rtol=1e-5,
        atol=1e-5,
    )


@given(prompts())
@settings(deadline=None)
def test_votes_over_all_keys_are_the_weights_of_torchs_attention(prompt: Prompt) -> None:
    group = prompt.query.shape[0] // prompt.key.shape[0]
    identity = torch.eye(prompt.length).expand(prompt.query.shape[0], -1, -1)
    key = prompt.key.repeat_interleave(group, 0)
    weights = functional.scaled_dot_product_attention(
        prompt.query[None], key[None], identity[None], is_causal=True, scale=SCALE
    )[0]
    votes = votes_of(WindowScorer(3, softmax_domain=SoftmaxDomain.ALL), prompt)
    torch.testing.assert_close(votes, weights[:, -3:].sum(1), rtol=1e-5, atol=1e-5)


@given(
    prompts(),
    scorers(),
    st.integers(1, 9),
    st.integers(0, 3),
    st.booleans(),
)
@settings(deadline=None)
def test_votes_of_chunks_join_with_nan_in_padding_and_unread_keys(
    prompt: Prompt, scorer: WindowScorer, chunk: int, num_padding: int, padding_is_negative: bool
) -> None:
    """A chunk is padded with NaN; the scratch has NaN beyond the chunk, and is longer than the prompt."""
    total = torch.zeros(prompt.query.shape[0], prompt.length + 5)
    prompt = replace(
        prompt,
        window_start=max(
            prompt.num_sink, min(prompt.window_start, prompt.length - scorer.observation_window)
        ),
    )
    for start in range(0, prompt.length, chunk):
        end = min(start + chunk, prompt.length)
        num_columns = chunk + num_padding
        query = torch.full((prompt.query.shape[0], num_columns, WIDTH), torch.nan)
        query[:, : end - start] = prompt.query[:, start:end]
        index = torch.arange(start, start + num_columns)
        index = torch.where(index < end, index, -1 if padding_is_negative or end < prompt.length else index)
        scratch = torch.full((prompt.key.shape[0], prompt.length + 5, WIDTH), torch.nan)
        scratch[:, :end] = prompt.key[:, :end]
        join_votes(
            scorer,
            total,
            votes_of(scorer, replace(prompt, query=query, key=scratch), index=index, length=prompt.length),
        )
    torch.testing.assert_close(total[:, : prompt.length], votes_of(scorer, prompt), rtol=1e-5, atol=1e-5)
    assert total[:, prompt.length :].eq(0).all()


def test_other_keys_than_candidates_change_no_vote() -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = Prompt(
        torch.randn(4, 20, WIDTH, generator=generator), torch.randn(2, 20, WIDTH, generator=generator), 2, 12
    )
    spoiled = replace(prompt, key=prompt.key.clone())
    spoiled.key[:, :2] = torch.nan
    spoiled.key[:, 12:] = torch.nan
    scorer = WindowScorer(4)
    assert torch.equal(votes_of(scorer, spoiled), votes_of(scorer, prompt))


def test_one_static_graph_serves_every_prompt() -> None:
    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    scorer = WindowScorer(3, observation_half_life=2)

    @torch.compile(backend=backend, fullgraph=True, dynamic=False)
    def votes(
        query: Tensor, key: Tensor, index: Tensor, window_start: Tensor, num_prompt_tokens: Tensor
    ) -> Tensor:
        return votes_of(
            scorer, Prompt(query, key, 1, 1), index=index, window_start=window_start, length=num_prompt_tokens
        )

    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(4, 20, WIDTH, generator=generator),
        torch.randn(2, 20, WIDTH, generator=generator),
    )
    for length in (20, 11, 5):
        index = torch.where(torch.arange(20) < length, torch.arange(20), -1)
        counted = votes(query, key, index, torch.tensor(length - 4), torch.tensor(length))
        prompt = Prompt(query[:, :length], key[:, :length], 1, length - 4)
        torch.testing.assert_close(counted[:, :length], votes_of(scorer, prompt))
    assert len(graphs) == 1


def plain_ranking(
    scorer: WindowScorer, votes: Sequence[Sequence[int]], num_kv_heads: int, candidates: range
) -> list[list[int]]:
    def pool(of_head: Sequence[int], index: int) -> Fraction:
        reach = scorer.pooling_size // 2
        fade = Fraction(1, 2) if scorer.pooling_half_life else Fraction(1)
        near = [
            of_head[other] * fade ** abs(other - index)
            for other in candidates
            if abs(other - (index - scorer.pooling_shift)) <= reach
        ]
        return Fraction(sum(near), len(near)) if scorer.pooling is Pooling.AVERAGE else Fraction(max(near))

    def score(group: Sequence[Sequence[int]], index: int) -> Fraction:
        pooled = [pool(of_head, index) for of_head in group]
        return (
            sum(pooled, Fraction()) / len(pooled)
            if scorer.head_reduction is HeadReduction.MEAN
            else max(pooled)
        )

    def of_chunk(group: Sequence[Sequence[int]], index: int) -> Fraction:
        first = index - (index - candidates.start) % scorer.selection_chunk
        chunk = range(first, min(first + scorer.selection_chunk, candidates.stop))
        return sum((score(group, other) for other in chunk), Fraction()) / len(chunk)

    size = len(votes) // num_kv_heads
    groups = [votes[head * size : (head + 1) * size] for head in range(num_kv_heads)]
    return [sorted(candidates, key=lambda index: (-of_chunk(group, index), index)) for group in groups]


@pytest.mark.parametrize("reduction", HeadReduction)
@pytest.mark.parametrize("pooling", Pooling)
@given(data=st.data())
@settings(deadline=None)
def test_selection_equals_plain_loops_ties_included(
    pooling: Pooling, reduction: HeadReduction, data: st.DataObject
) -> None:
    """There are few different votes, so that many tie, and all divide without remainder, so that ties
    stay.
    """
    pooling_size, chunk = data.draw(st.sampled_from([1, 3, 5, 7])), data.draw(st.sampled_from([1, 2, 3, 7]))
    shift = data.draw(st.integers(0, pooling_size // 2))
    scorer = WindowScorer(
        pooling=pooling,
        pooling_size=pooling_size,
        pooling_shift=shift,
        pooling_half_life=data.draw(
            st.integers(0, pooling is Pooling.MAXIMUM)
        ),  # of 1: powers of two, which are exact
        head_reduction=reduction,
        selection_chunk=chunk,
    )
    num_kv_heads, group, num_keys = (
        data.draw(st.integers(1, 2)),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 20)),
    )
    num_sink = data.draw(st.integers(0, min(3, num_keys)))
    end, num_kept = data.draw(st.integers(num_sink, num_keys)), data.draw(st.integers(0, 6))
    row = st.lists(
        st.integers(0, 4).map(lambda vote: vote * math.lcm(*range(1, 8)) ** 2 * 6),
        min_size=num_keys,
        max_size=num_keys,
    )
    votes = data.draw(st.lists(row, min_size=num_kv_heads * group, max_size=num_kv_heads * group))
    num_lent = data.draw(st.integers(0, 4)) if end - num_sink > num_kept else 0
    kept = select(
        scorer, torch.tensor(votes, dtype=torch.float32), num_kv_heads, num_sink, end, num_kept, num_lent
    )
    assert kept.dtype == torch.int64
    assert kept.shape == (num_kv_heads, min(end - num_sink, num_kept + num_lent))
    ranked = plain_ranking(scorer, votes, num_kv_heads, range(num_sink, end))
    assert kept.tolist() == [
        [*sorted(best[:num_kept]), *best[num_kept : num_kept + num_lent][::-1]] for best in ranked
    ]


def test_pooling_sees_nothing_beyond_the_candidates() -> None:
    votes = torch.tensor([[torch.nan, 9.0, 1.0, 1.0, 1.0, 9.0, torch.nan]])
    for pooling in Pooling:
        scorer = WindowScorer(pooling=pooling, pooling_size=5)
        assert select(scorer, votes, 1, 2, 5, 1).tolist() == [[2]]
        assert select(scorer, votes, 1, 1, 5, 1).tolist() == [[1]]


def test_the_scorers_options_choose_differently() -> None:
    """One prompt on which every option matters, with the choice worked out by hand."""
    votes = torch.tensor([[12.0, 0, 0, 0, 6, 6, 6, 0], [0, 0, 10, 0, 6, 6, 6, 0]])

    def best(pooling: Pooling, pooling_size: int, reduction: HeadReduction) -> list[int]:
        scorer = WindowScorer(pooling=pooling, pooling_size=pooling_size, head_reduction=reduction)
        return select(scorer, votes, 1, 0, 8, 1)[0].tolist()

    assert best(Pooling.AVERAGE, 1, HeadReduction.MEAN) == [0]  # 6 before the equal 4, 5 and 6
    # Three sixes average 6; the border's 12 and 0 do so in one head only.
    assert best(Pooling.AVERAGE, 3, HeadReduction.MEAN) == [5]
    # Token 1 is next to the 12 of one head and the 10 of the other.
    assert best(Pooling.MAXIMUM, 3, HeadReduction.MEAN) == [1]
    assert best(Pooling.MAXIMUM, 3, HeadReduction.MAXIMUM) == [0]
    assert best(Pooling.AVERAGE, 3, HeadReduction.MAXIMUM) == [0]


def test_chunks_are_kept_whole_but_the_last() -> None:
    # The chunks of three after the sink have 4, 13 and 13 votes.
    votes = torch.tensor([[9.0, 0, 0, 4, 4, 4, 5, 5, 0, 8]])

    def kept(num_kept: int) -> list[int]:
        return select(WindowScorer(pooling_size=1, selection_chunk=3), votes, 1, 1, 10, num_kept)[0].tolist()

    assert kept(3) == [4, 5, 6]
    assert kept(5) == [4, 5, 6, 7, 8]


def test_with_a_half_life_distant_neighbours_borrow_less() -> None:
    votes = torch.tensor([[0.0, 0, 0, 0, 8, 0, 0, 0, 0, 5, 0]])

    def kept(pooling: Pooling, half_life: int) -> list[int]:
        scorer = WindowScorer(pooling=pooling, pooling_size=7, pooling_half_life=half_life)
        return select(scorer, votes, 1, 0, 11, 4)[0].tolist()

    assert kept(Pooling.MAXIMUM, 0) == [1, 2, 3, 4]  # one find takes all the room
    assert kept(Pooling.MAXIMUM, 2) == [3, 4, 5, 9]  # 5.7, 8, 5.7 and 5
    # 1.94, 1.40 from both, 1.53, and 1.38 near the border against 1.37.
    assert kept(Pooling.AVERAGE, 2) == [4, 6, 9, 10]


@pytest.mark.parametrize("pooling", Pooling)
def test_a_shifted_window_keeps_the_tokens_that_follow(pooling: Pooling) -> None:
    votes = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0]])
    scorer = WindowScorer(pooling=pooling, pooling_size=5, pooling_shift=1)
    assert select(scorer, votes, 1, 0, 7, 5).tolist() == [[1, 2, 3, 4, 5]]


def test_scores_of_a_leading_layer_win_where_they_are_higher() -> None:
    scorer, votes = WindowScorer(pooling_size=1), torch.tensor([[0.0, 3, 2, 1, 0], [0.0, 0, 1, 2, 3]])
    leader_scores = torch.tensor([0.0, 0, 2.5, 0])  # of tokens 1 to 4
    assert select(scorer, votes, 2, 1, 5, 2).tolist() == [[1, 2], [3, 4]]
    assert select(scorer, votes, 2, 1, 5, 2, leader_scores=leader_scores).tolist() == [[1, 3], [3, 4]]


def test_the_scores_of_candidates_are_their_votes_by_kv_head() -> None:
    votes = torch.tensor([[9.0, 2, 4], [9.0, 4, 0], [9.0, 1, 1], [9.0, 3, 5]])
    assert candidate_scores(WindowScorer(pooling_size=1), votes, 2, 1, 3).tolist() == [[3.0, 2.0], [2.0, 3.0]]
