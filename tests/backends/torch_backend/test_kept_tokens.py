"""The tokens that a slot is said to hold are those of the plain reference, head by head."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.scorer import WindowScorer
from tests.backends.checkpoints import save_checkpoint
from tests.backends.contents import recipe_of
from tests.backends.driver import Driver, Request, open_backend
from tests.backends.oracle import random_prompt
from tests.reference.sequence import Sequence, load_reference

SNAPSTREAM = PolicyOptions(
    PolicyName.SNAPSTREAM,
    num_sink=2,
    num_recent=8,
    num_kept=5,
    scorer=WindowScorer(observation_window=4, pooling_size=3),
)
POLICIES = {
    "full": PolicyOptions(PolicyName.FULL),
    "streaming-llm": PolicyOptions(PolicyName.STREAMING_LLM, num_sink=2, num_recent=8),
    "snapstream": SNAPSTREAM,
    "snapstream, lent": replace(SNAPSTREAM, lend_kept=True, lend_ring=True),
}


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_held_tokens_are_the_references(architecture: str, policy: PolicyOptions, tmp_path: Path) -> None:
    path = save_checkpoint(architecture, tmp_path, seed=1)
    backend, model = open_backend(path, policy, max_model_len=96), load_reference(path)
    full = [layer.kind.sliding_window is None for layer in backend.pools[0].cache.layers]
    assert any(full)
    for length in (1, 9, 15, 16, 61):
        request = Request(random_prompt(length))
        Driver(backend, 6).read(request)
        sequence = Sequence(model, recipe_of(backend.spec.pools[0].policy), request.prompt)
        expected = [
            [{token.index for token in slot.held()} for slot in sequence.layers[index].slots]
            for index, is_full in enumerate(full)
            if is_full
        ]
        assert request.kept is not None
        assert request.kept.num_tokens == length
        assert [[_indices(head) for head in heads] for heads in request.kept.heads] == expected, length
    backend.close()


def _indices(bitmap: bytes) -> set[int]:
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_store_holds_all_tokens(tmp_path: Path) -> None:
    sparse = PolicyOptions(PolicyName.SPARSE, num_sink=2, num_recent=8, num_attended=5)
    backend = open_backend(save_checkpoint("llama", tmp_path), sparse, max_model_len=96)
    request = Request(random_prompt(61))
    Driver(backend, 6).read(request)
    assert request.kept is not None
    assert all(_indices(head) == set(range(61)) for heads in request.kept.heads for head in heads)
    backend.close()
