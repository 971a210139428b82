"""The tokens of a prompt that the last layer computes.

What comes of it is compared in `test_exact_*` and `test_bounded_prefill`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor, nn

from backends.interface import BackendError, PrefillBatch, PrefillRow, PromptPooling
from backends.torch_backend.backend import TorchBackend
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.scorer import WindowScorer
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import Driver, Request, open_backend
from tests.backends.oracle import random_prompt

CHUNK, OBSERVED = 32, 6
POLICY = PolicyOptions(
    PolicyName.SNAPSTREAM, num_sink=2, num_recent=20, num_kept=10, scorer=WindowScorer(OBSERVED)
)
# Tokens of a chunk that a feed-forward part reads. The end has two: a single row could round otherwise.
WHOLE = [CHUNK]
END = [2]


@pytest.fixture(scope="module", params=["llama", "deepseek-v3"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    path = save_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))
    return open_backend(path, POLICY, max_model_len=256, prefill_chunk=CHUNK)


class Watch:
    """Count the tokens in the first and last feed-forward part and in the output layer, by chunk."""

    def __init__(self, backend: TorchBackend) -> None:
        self.first: list[int] = []
        self.last: list[int] = []
        self.output: list[int] = []
        model, num_layers = backend._model, backend._model.config.num_hidden_layers
        names = {
            "model.layers.0.mlp": self.first,
            f"model.layers.{num_layers - 1}.layer.mlp": self.last,
            "lm_head": self.output,
        }
        self._handles = [
            model.get_submodule(name).register_forward_pre_hook(_note(seen)) for name, seen in names.items()
        ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()


def _note(seen: list[int]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    return lambda _, given: seen.append(given[0].shape[1])


@pytest.fixture
def watch(backend: TorchBackend) -> Iterator[Watch]:
    found = Watch(backend)
    yield found
    found.end()


def test_of_a_long_prompt_the_last_layer_reads_only_the_end(backend: TorchBackend, watch: Watch) -> None:
    """Of three chunks, the last one votes; nothing is drawn from the others."""
    Driver(backend, CHUNK).read(Request(random_prompt(3 * CHUNK)))
    assert watch.first == WHOLE * 3
    assert watch.last == [*END, *END, OBSERVED]
    assert watch.output == [1]


def test_votes_that_straddle_two_chunks_are_all_cast(backend: TorchBackend, watch: Watch) -> None:
    Driver(backend, CHUNK).read(Request(random_prompt(2 * CHUNK + OBSERVED // 2)))
    assert watch.last == [*END, OBSERVED, 4], "a part of the observation window is in each of the last two"


def test_prompts_that_fit_their_slots_are_shortened_too(backend: TorchBackend, watch: Watch) -> None:
    Driver(backend, 8).read(
        *(Request(random_prompt(length), slots=(slot,)) for slot, length in enumerate((8, 5)))
    )
    assert watch.first == [8], "both in one batch"
    assert watch.last == END


def test_a_prompt_whose_tokens_are_scored_is_read_whole(backend: TorchBackend, watch: Watch) -> None:
    """And so is another in the same batch, whose token is the one that it has alone."""
    scored, beside, alone = (
        Request(random_prompt(8), num_prompt_logprobs=0),
        *(Request(random_prompt(8, 1), slots=(1,)) for _ in range(2)),
    )
    Driver(backend, 8).read(scored, beside)
    assert watch.last == watch.output == [8]
    Driver(backend, 8).read(alone)
    assert watch.last == [8, *END]
    assert beside.tokens == alone.tokens


@pytest.mark.parametrize(("pooling", "num_tokens"), [(PromptPooling.MEAN, CHUNK), (PromptPooling.LAST, 2)])
def test_a_pooled_prompt_skips_layers_that_its_pooling_does_not_need(
    backend: TorchBackend, watch: Watch, pooling: PromptPooling, num_tokens: int
) -> None:
    row = PrefillRow("pooled", tuple(random_prompt(CHUNK)), 0, CHUNK, slots=(), scratch=0, pooling=pooling)
    shape = next(shape for shape in backend.spec.prefill_shapes if shape.num_tokens == CHUNK)
    result = backend.submit(PrefillBatch((row,), shape)).result()
    assert watch.last == [num_tokens]
    assert watch.output == []
    assert len(result.hidden[0]) == backend.spec.embedding_size, (
        "its numbers are compared in `test_embeddings`"
    )


def test_a_failing_layer_does_not_break_the_next_chunk(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails before it has written or after."""
    undisturbed = Request(random_prompt(CHUNK))
    Driver(backend, CHUNK).read(undisturbed)
    number = backend._model.config.num_hidden_layers - 1
    for part in ("input_layernorm", "mlp"):
        with monkeypatch.context() as patch:
            patch.setattr(
                backend._model.get_submodule(f"model.layers.{number}.layer.{part}"), "forward", _fail
            )
            with pytest.raises(BackendError, match="out of order"):
                Driver(backend, CHUNK).read(Request(random_prompt(CHUNK, seed=1)))
        again = Request(random_prompt(CHUNK))
        Driver(backend, CHUNK).read(again)
        assert again.tokens == undisturbed.tokens


def _fail(*_: object) -> None:
    raise RuntimeError("out of order")


def test_a_layer_that_is_shortened_keeps_its_attributes(backend: TorchBackend) -> None:
    number = backend._model.config.num_hidden_layers - 1
    last: Any = backend._model.get_submodule(f"model.layers.{number}")
    assert last.self_attn.layer_idx == number
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = last.no_such_thing
