"""A draft's importance of a prompt's chunks, against the attention that plain transformers reports."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.clock import VirtualClock
from backends.config import DRAFT_SCORER, BackendConfig
from backends.entry import BackendEntry
from backends.interface import Importance, PrefillBatch, PrefillRow
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.compiled.build import code_folder
from backends.torch_backend.config import DeviceName, DtypeName, TorchOptions
from backends.torch_backend.entry import ENTRY
from tests.backends.checkpoints import VOCAB_SIZE, load_oracle, save_checkpoint
from tests.backends.kernels import copy_kernels

LENGTH = 150
CHUNK = 32
NUM_AHEAD = 4
WEIGHT = 0.25
MODELS = ("llama", "qwen3", "gemma3", "lfm2")


@pytest.fixture(
    scope="module",
    params=[(model, uses_kernels) for model in MODELS for uses_kernels in (False, True)],
    ids=[f"{model}-{kind}" for model in MODELS for kind in ("plain", "kernels")],
)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, built_kernels: Path
) -> tuple[TorchBackend, torch.nn.Module]:
    model, uses_kernels = request.param
    path = save_checkpoint(model, tmp_path_factory.mktemp("draft"))
    cache = tmp_path_factory.mktemp("cache")
    copy_kernels(built_kernels, code_folder(cache))
    entry: BackendEntry[TorchOptions] = ENTRY
    options = TorchOptions(
        device=DeviceName.CPU, dtype=DtypeName.FLOAT32, compile=uses_kernels, compile_cache=cache
    )
    base = BackendConfig("the target", prefill_chunk=CHUNK).of_draft(str(path))
    backend = entry.configure(base, options, lambda _: pytest.fail("no other backend")).load(
        VirtualClock(), 0
    )
    assert isinstance(backend, TorchBackend)
    backend.warmup()
    while backend.use_idle_time():
        pass
    assert backend._kernels.are_used is uses_kernels
    return backend, load_oracle(path)


def tokens(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())


def measured(
    backend: TorchBackend, prompt: tuple[int, ...], wanted: Importance, echo: tuple[int, ...] = ()
) -> Tensor:
    """Read a prompt in chunks, the last of which cuts the observation window."""
    shape = next(
        shape for shape in backend.spec.prefill_shapes if (shape.num_rows, shape.num_tokens) == (1, CHUNK)
    )
    for start in range(0, len(prompt), CHUNK):
        chunk = prompt[start : start + CHUNK]
        is_last = start + len(chunk) == len(prompt)
        row = PrefillRow(
            "a",
            chunk,
            start,
            len(prompt),
            (),
            scratch=0,
            importance=wanted,
            echo=echo if is_last else (),
            echo_weight=WEIGHT,
        )
        result = backend.submit(PrefillBatch((row,), shape)).result()
        assert bool(result.importance[0]) is is_last
    return torch.tensor(result.importance[0])


def attention(oracle: torch.nn.Module, token_ids: tuple[int, ...], num_keys: int) -> list[Tensor]:
    """Return what each query of each full-attention layer pays to the first keys, [head, query, key]."""
    with torch.inference_mode():
        layers = oracle(torch.tensor([token_ids]), output_attentions=True).attentions
    kinds = getattr(oracle.config, "layer_types", None) or ["full_attention"] * len(layers)
    kinds = [kind for kind in kinds if kind.endswith("attention")]
    paid = [
        layer[0, :, :, :num_keys]
        for layer, kind in zip(layers, kinds, strict=True)
        if kind == "full_attention"
    ]
    return [layer / layer.sum(-1, keepdim=True) for layer in paid]


def smoothed(of_layers: list[Tensor]) -> Tensor:
    """Return the largest of the means of 13 neighbours over layers and heads, from [head, key] each."""
    means = []
    for layer in of_layers:
        padded = torch.nn.functional.pad(layer, (6, 6))
        means.append(torch.stack([padded[:, i : i + 13].mean(1) for i in range(layer.shape[1])], 1).amax(0))
    return torch.stack(means).amax(0)


def means_of(scores: Tensor) -> Tensor:
    return torch.stack([scores[i : i + CHUNK].mean() for i in range(0, len(scores), CHUNK)])


@pytest.mark.parametrize("num_echoed", [0, 9])
def test_the_tail_and_the_question_score_the_prompt(
    models: tuple[TorchBackend, torch.nn.Module], num_echoed: int
) -> None:
    backend, oracle = models
    prompt, echo = tokens(LENGTH, 0), tokens(num_echoed, 1)
    layers = attention(oracle, prompt + echo, LENGTH)
    window = DRAFT_SCORER.observation_window
    voted = [
        torch.cat([layer[:, LENGTH - window : LENGTH], layer[:, LENGTH:] * WEIGHT], dim=1).amax(1)
        for layer in layers
    ]
    expected = means_of(smoothed(voted))
    assert torch.allclose(measured(backend, prompt, Importance(CHUNK), echo), expected, rtol=2e-4)


def test_the_draft_s_next_tokens_score_the_prompt(models: tuple[TorchBackend, torch.nn.Module]) -> None:
    backend, oracle = models
    prompt = tokens(LENGTH, 2)
    answer = prompt
    with torch.inference_mode():
        for _ in range(NUM_AHEAD - 1):
            answer += (int(oracle(torch.tensor([answer])).logits[0, -1].argmax()),)
    layers = attention(oracle, answer, LENGTH)
    steps = [smoothed([layer[:, LENGTH - 1 + step] for layer in layers]) for step in range(NUM_AHEAD)]

    def expected(num_steps: int) -> Tensor:
        return means_of(torch.stack(steps[:num_steps]).mean(0))

    whole = measured(backend, prompt, Importance(CHUNK, NUM_AHEAD))
    assert torch.allclose(whole, expected(NUM_AHEAD), rtol=2e-4)
    stopped = Importance(CHUNK, NUM_AHEAD, frozenset({answer[LENGTH + 1]}))
    num_before = answer[LENGTH:].index(answer[LENGTH + 1]) + 1
    assert torch.allclose(measured(backend, prompt, stopped), expected(num_before), rtol=2e-4)
    # What was read before leaves nothing behind.
    assert torch.equal(measured(backend, prompt, Importance(CHUNK, NUM_AHEAD)), whole)
