"""The reference against the paper's worked example, sums done by hand, and the model's own attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.checkpoints import ARCHITECTURES, VOCAB_SIZE, load_oracle, save_checkpoint
from tests.reference.recipe import Recipe
from tests.reference.sequence import Sequence, load_reference
from tests.reference.slot import Slot, Token
from tests.reference.votes import candidates, top, votes


def _prompt(num_tokens: int) -> list[Token]:
    return [Token(index, torch.zeros(1), torch.zeros(1)) for index in range(num_tokens)]


def _indices(slot: Slot) -> list[int | None]:
    return [None if token is None else token.index for token in slot.entries()]


def test_ring_is_the_papers_worked_example() -> None:
    """Figure 4: one sink, four recent, the prompt's last token 26."""
    slot = Slot(Recipe(num_sink=1, num_recent=4, num_kept=0, prompt_window=4), _prompt(27), [])
    assert _indices(slot) == [0, 25, 26, 23, 24]
    slot.append(Token(27, torch.zeros(1), torch.zeros(1)))
    assert _indices(slot) == [0, 25, 26, 27, 24]


def test_unused_kept_entries_are_between_ring_and_kept_tokens() -> None:
    recipe = Recipe(num_sink=1, num_recent=3, num_kept=3, prompt_window=2)
    assert _indices(Slot(recipe, _prompt(4), [1])) == [0, None, 2, 3, None, None, 1]
    assert _indices(Slot(recipe.with_options(lend_kept=True), _prompt(4), [1])) == [
        0,
        None,
        2,
        3,
        None,
        None,
        1,
    ]


def test_lent_entries_delay_the_first_loss() -> None:
    recipe = Recipe(num_sink=1, num_recent=2, num_kept=2, prompt_window=2)
    plain, lent = Slot(recipe, _prompt(3), []), Slot(recipe.with_options(lend_kept=True), _prompt(3), [])
    for index in (3, 4):
        plain.append(Token(index, torch.zeros(1), torch.zeros(1)))
        lent.append(Token(index, torch.zeros(1), torch.zeros(1)))
    assert _indices(plain) == [0, 3, 4, None, None]
    assert _indices(lent) == [0, 1, 2, 3, 4]


def test_a_ring_lends_its_oldest_entries_until_they_are_overwritten() -> None:
    slot = Slot(
        Recipe(num_sink=1, num_recent=4, num_kept=2, prompt_window=4, num_lent=2), _prompt(12), [2, 5], [7, 3]
    )
    assert _indices(slot) == [0, 3, 10, 11, 7, 2, 5]
    slot.append(Token(12, torch.zeros(1), torch.zeros(1)))
    assert _indices(slot) == [0, 3, 10, 11, 12, 2, 5]


def test_votes_of_one_query_by_hand() -> None:
    """Keys of width 1 and a query of 1 give softmax(key), over candidates 1, 2 and 3 or over all tokens."""
    recipe = Recipe(num_sink=1, num_recent=1, num_kept=1, prompt_window=1)
    weights = torch.tensor([4.0, 1.0, 2.0, 5.0, 8.0])
    keys, queries = weights.log()[:, None], [torch.ones(5, 1)]
    assert list(candidates(recipe, 5)) == [1, 2, 3]

    def scores(**options: object) -> Tensor:
        return votes(recipe.with_options(**options), queries, keys, 1.0, None)

    torch.testing.assert_close(scores(), torch.tensor([1.0, 2.0, 5.0]) / 8)
    torch.testing.assert_close(scores(softmax_over="all"), torch.tensor([1.0, 2.0, 5.0]) / 20)
    torch.testing.assert_close(scores(pooling_size=3), torch.tensor([1.5, 8 / 3, 3.5]) / 8)
    torch.testing.assert_close(scores(pooling="maximum", pooling_size=3), torch.tensor([2.0, 5.0, 5.0]) / 8)
    assert top(scores(pooling="maximum", pooling_size=3), range(1, 4), 1) == [2]


def test_votes_of_two_heads_and_two_queries_by_hand() -> None:
    """A query of 0 attends to all keys alike; one of 1 as their weights."""
    recipe = Recipe(num_sink=0, num_recent=2, num_kept=1, prompt_window=2, observation_window=2)
    keys = torch.tensor([3.0, 1.0, 1.0, 1.0]).log()[:, None]
    indifferent, attentive = torch.zeros(4, 1), torch.tensor([[0.0], [0.0], [0.0], [1.0]])
    heads = [indifferent, attentive]
    torch.testing.assert_close(
        votes(recipe, heads, keys, 1.0, None), torch.tensor([1.0 + 1.25, 1.0 + 0.75]) / 2
    )
    maximum = recipe.with_options(head_reduction="maximum")
    torch.testing.assert_close(votes(maximum, heads, keys, 1.0, None), torch.tensor([1.25, 1.0]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_reference_that_holds_everything_is_the_models_own_attention(
    architecture: str, tmp_path: Path
) -> None:
    path = save_checkpoint(architecture, tmp_path)
    oracle: Any = load_oracle(path)
    prompt = torch.randint(3, VOCAB_SIZE, (1, 23), generator=torch.Generator().manual_seed(0))
    expected = oracle.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        logits = oracle(expected[:, :-1]).logits[0]

    sequence = Sequence(load_reference(path), Recipe.full(39), prompt[0].tolist())
    assert sequence.extend(16) == expected[0, 23:].tolist()
    torch.testing.assert_close(
        torch.cat([sequence.prompt_logits, torch.stack(sequence.logits[1:])]), logits, atol=1e-4, rtol=0
    )
