"""transformers' results: greedy continuations, logits, and the comparison of log-probabilities."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.interface import SampledToken
from tests.backends.checkpoints import VOCAB_SIZE

TOLERANCE = 1e-4
_LEAST_MARGIN = TOLERANCE  # between the best token and the next: below it, float noise might choose


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(
        3, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(1000 * seed + num_tokens)
    ).tolist()


@dataclass(frozen=True)
class Continuation:
    """A greedy continuation.

    `logits` [token, vocabulary] are those of all tokens of the sequence but the last.
    """

    tokens: list[int]
    prompt_logits: Tensor  # of the prompt's tokens from the second on
    logits: Tensor  # of `tokens`


def continue_greedily(model: Any, prompt: list[int], num_tokens: int) -> Continuation:
    """Continue a prompt by the model's own `generate`."""
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with torch.no_grad():
        logits = model(output[:, :-1]).logits[0]
    best = logits[len(prompt) - 1 :].topk(2).values
    margin = float((best[:, 0] - best[:, 1]).min())
    assert margin > _LEAST_MARGIN, (
        f"two tokens are {margin:.1e} apart in the oracle itself: choose another prompt"
    )
    return Continuation(
        output[0, len(prompt) :].tolist(), logits[: len(prompt) - 1], logits[len(prompt) - 1 :]
    )


def assert_same_logprobs(
    sampled: Sequence[SampledToken], logits: Tensor | Iterable[Tensor], num_top: int
) -> None:
    """The chosen tokens' log-probabilities and the best tokens' are those of `logits`, a row a token."""
    rows = list(logits)
    assert len(sampled) == len(rows)
    for place, (token, row) in enumerate(zip(sampled, rows, strict=True)):
        expected = row.log_softmax(-1)
        assert token.logprob is not None
        assert abs(token.logprob - float(expected[token.token_id])) < TOLERANCE, f"token {place}"
        ids = [token_id for token_id, _ in token.top_logprobs]
        assert len(set(ids)) == len(ids) == num_top
        values = torch.tensor([value for _, value in token.top_logprobs])
        assert (values - expected.topk(num_top).values).abs().max() < TOLERANCE, f"token {place}"
        assert (values - expected[ids]).abs().max() < TOLERANCE, f"token {place}"
