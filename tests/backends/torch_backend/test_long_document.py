"""The demo model on documents eight times as long as its slots, against the published algorithm."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoTokenizer

from backends.torch_backend.backend import TorchBackend
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from examples.demo_model.corpus import make_case
from tests.backends.contents import assert_same_contents, recipe_of
from tests.backends.driver import Driver, Request, open_backend
from tests.reference.sequence import Sequence, load_reference

DEMO_MODEL = Path(__file__).parents[3] / "server" / "demo_model"
NUM_PROMPT_TOKENS, CAPACITY, CHUNK = 4096, 512, 256


@pytest.fixture(scope="module")
def backend() -> Iterator[TorchBackend]:
    policy = PolicyOptions(PolicyName.SNAPSTREAM, slot_capacity=CAPACITY)
    opened = open_backend(
        DEMO_MODEL, policy, max_model_len=NUM_PROMPT_TOKENS + 256, num_slots=2, prefill_chunk=CHUNK
    )
    yield opened
    opened.close()


def _prompt(num_tokens: int) -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    case = make_case(
        3, num_tokens - 40, lambda text: len(tokenizer.encode(text, add_special_tokens=False)), depth=0.3
    )
    encoded = tokenizer.apply_chat_template(case.messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


@pytest.mark.long
def test_tokens_and_slots_are_the_reference_s(backend: TorchBackend) -> None:
    request = Request(_prompt(NUM_PROMPT_TOKENS), slots=(1,))
    assert NUM_PROMPT_TOKENS - 100 < len(request.prompt) <= NUM_PROMPT_TOKENS
    sequence = Sequence(load_reference(DEMO_MODEL), recipe_of(backend.spec.pools[0].policy), request.prompt)

    Driver(backend, CHUNK).run(request, num_tokens=16)

    assert request.tokens == sequence.extend(16)
    assert_same_contents(backend, 1, sequence, is_packed=True)


def test_memory_held_does_not_depend_on_the_prompt(backend: TorchBackend) -> None:
    driver, held = Driver(backend, CHUNK), []
    for num_tokens in (200, NUM_PROMPT_TOKENS, 2000):
        driver.run(Request(_prompt(num_tokens)), num_tokens=4)
        driver.run(
            Request(_prompt(200), slots=(1,)), num_tokens=2
        )  # so that the last step, which the backend still has, is the same
        held.append(_num_tensor_bytes())

    assert held[0] == held[1] == held[2]
    assert (
        held[0] > 2 * 2 * CAPACITY * 128 * 4
    )  # the slots of one layer at least: slots × planes × entries × width × bytes


def _num_tensor_bytes() -> int:
    """Return the bytes of every tensor alive in this process; tensors that share their storage count once."""
    gc.collect()
    things = (
        thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)
    )  # isinstance would wake lazy objects
    tensors = [
        tensor for tensor in things if not isinstance(tensor, FakeTensor)
    ]  # shapes without bytes, of an earlier compilation
    alive = [
        tensor for tensor in tensors if tensor.layout is torch.strided
    ]  # not the model's weights in oneDNN's own layout
    return sum(
        {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}.values()
    )
