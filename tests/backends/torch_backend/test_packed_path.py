"""Tokens read by decode have the reference's log-probabilities; with `full`, transformers'."""

from collections.abc import Sequence as Items
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backends.interface import SampledToken
from backends.torch_backend.backend import TorchBackend
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.scorer import WindowScorer
from scheduler.messages import Add, StopCriteria
from tests.backends.checkpoints import load_oracle, save_checkpoint
from tests.backends.contents import recipe_of
from tests.backends.driver import GREEDY, open_backend
from tests.backends.oracle import assert_same_logprobs, random_prompt
from tests.backends.test_contract import Conversation
from tests.reference.sequence import Sequence, load_reference

NUM_TOP = 20
NUM_TOKENS = 5
OBSERVED = replace(GREEDY, num_logprobs=NUM_TOP)
POLICY = PolicyOptions(
    PolicyName.SNAPSTREAM,
    num_sink=2,
    num_recent=8,
    num_kept=5,
    scorer=WindowScorer(observation_window=4, pooling_size=3),
)
# Prefill reads less than the sinks, fits the slot, goes through scratch; decode reads one token, some, and
# enough to overwrite the ring.
CASES = ((1, 30), (9, 10), (12, 40), (20, 21), (20, 26), (41, 60))


def served(
    backend: TorchBackend, max_tokens: int = NUM_TOKENS
) -> list[tuple[Add, list[SampledToken], list[SampledToken]]]:
    """Serve all cases together, and return each one's scores and answer."""
    conversation = Conversation(backend, max_decode_steps=8)
    adds = [
        Add(
            str(number),
            tuple(random_prompt(length)),
            OBSERVED,
            StopCriteria(max_tokens),
            0.0,
            1,
            num_prompt_logprobs=NUM_TOP,
        )
        for number, (_, length) in enumerate(CASES)
    ]
    adds = [
        replace(add, num_prefill_tokens=num_prefill)
        for add, (num_prefill, _) in zip(adds, CASES, strict=True)
    ]
    conversation.send(*adds)
    outputs = conversation.finish().outputs
    scores = {output.request_id: list(output.prompt_logprobs) for output in outputs if output.prompt_logprobs}
    return [(add, scores[add.request_id], conversation.sampled(add.request_id)) for add in adds]


def check(add: Add, scores: Items[SampledToken], logits: Items[Tensor]) -> None:
    assert tuple(score.token_id for score in scores) == add.prompt_token_ids[1:]
    assert_same_logprobs(scores, logits, NUM_TOP)


@pytest.mark.parametrize(
    ("architecture", "max_tokens"), [("llama", NUM_TOKENS), ("llama", 0), ("gemma3", NUM_TOKENS)]
)
def test_snapstream_is_the_references(
    architecture: str, max_tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = save_checkpoint(architecture, tmp_path_factory.mktemp("checkpoint"))
    backend, reference = open_backend(path, POLICY, max_model_len=96), load_reference(path)
    for add, scores, tokens in served(backend, max_tokens):
        num_prefill, num_forced = len(add.prompt_token_ids) - add.num_forced_tokens, add.num_forced_tokens
        sequence = Sequence(
            reference, recipe_of(backend.spec.pools[0].policy), list(add.prompt_token_ids[:num_prefill])
        )
        sequence.follow(list(add.prompt_token_ids[num_prefill:]))
        sequence.extend(max_tokens)
        check(add, scores, [*sequence.prompt_logits[:-1], *sequence.logits[:num_forced]])
        assert [token.token_id for token in tokens] == sequence.tokens[num_forced:]
        assert_same_logprobs(tokens, sequence.logits[num_forced:], NUM_TOP)
    backend.close()


@torch.no_grad()
def test_full_equals_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = save_checkpoint("qwen3", tmp_path_factory.mktemp("checkpoint"))
    backend, model = open_backend(path, PolicyOptions(PolicyName.FULL), max_model_len=96), load_oracle(path)
    for add, scores, tokens in served(backend):
        sequence = [*add.prompt_token_ids, *(token.token_id for token in tokens)]
        logits = model(torch.tensor([sequence[:-1]])).logits[0]
        num_scores = len(add.prompt_token_ids) - 1
        check(add, scores, logits[:num_scores])
        assert_same_logprobs(tokens, logits[num_scores:], NUM_TOP)
        assert [token.token_id for token in tokens] == logits[num_scores:].argmax(-1).tolist()
    backend.close()
