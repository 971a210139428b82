"""Mixers of Mamba-2 with our functions: transformers' mixers of every such family are the reference."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bamba.configuration_bamba import BambaConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.configuration_falcon_h1 import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.configuration_granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from backends.torch_backend.model import recurrent
from backends.torch_backend.model.recurrent import Mix, RecurrentMixer, RowStates, mix_live_rows
from backends.torch_backend.torch_private import onednn

ROWS, HEADS, HEAD, NUMBERS, GROUPS, WIDTH = 200, 8, 4, 16, 2, 16
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "mamba_d_head": HEAD,
    "mamba_d_state": NUMBERS,
    "mamba_n_groups": GROUPS,
    "mamba_n_heads": HEADS,
    "mamba_chunk_size": 4,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "bamba": lambda: BambaMixer(BambaConfig(**SIZES), 0),
    "falcon_h1": lambda: falcon(mamba_rms_norm=False),  # the gate is a part of the step
    "falcon_h1 with a norm": lambda: falcon(mamba_rms_norm=True),
    "granitemoehybrid": lambda: GraniteMoeHybridMambaLayer(
        GraniteMoeHybridConfig(**SIZES, layer_types=["mamba"], num_hidden_layers=1), 0
    ),
    "nemotron_h": lambda: NemotronHMamba2Mixer(
        NemotronHConfig(
            hidden_size=WIDTH,
            mamba_head_dim=HEAD,
            mamba_num_heads=HEADS,
            ssm_state_size=NUMBERS,
            n_groups=GROUPS,
            chunk_size=4,
        ),
        0,
    ),
}


def falcon(**changes: Any) -> FalconH1Mixer:
    mixer = FalconH1Mixer(
        FalconH1Config(**SIZES, mamba_d_ssm=HEADS * HEAD, num_hidden_layers=1, **changes), 0
    )
    mixer.register_buffer("mup_vector", torch.rand(1, 1, mixer.in_proj.out_features) + 0.5)
    return mixer


class Held:
    """A cache that has the states of one layer."""

    def __init__(self, states: RowStates) -> None:
        self.states = states

    def mix(self, layer: int, mixer: Mix, hidden: Tensor) -> Tensor:
        assert layer == 0
        return mixer(hidden, self.states)


def recorded(functions: Mapping[str, Callable[..., Tensor]], calls: list[str]) -> dict[str, Any]:
    """Return functions that note their names in `calls`."""

    def wrapped(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any, **options: Any) -> Tensor:
            calls.append(name)
            return function(*arguments, **options)

        return call

    return {name: wrapped(name, function) for name, function in functions.items()}


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_states_are_those_of_transformers(
    family: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("_STEPS", "_CONVOLUTIONS"):
        monkeypatch.setattr(recurrent, name, recorded(getattr(recurrent, name), calls))
    monkeypatch.setattr(onednn, "multiplies", lambda _dtype: False)
    torch.manual_seed(0)
    mixer = FAMILIES[family]().eval()
    for parameter in mixer.parameters():
        parameter.data.normal_(std=0.5)  # no heads or channels alike
    mixer.to(torch.bfloat16)  # so that all runs have the same weights and inputs
    hidden = torch.randn(ROWS, num_tokens, WIDTH).bfloat16()
    convolution = torch.randn(ROWS, mixer.conv1d.in_channels, mixer.conv1d.kernel_size[0]).bfloat16()
    recurrent_state = torch.randn(ROWS, HEADS, HEAD, NUMBERS)

    def run(dtype: torch.dtype, *, is_own: bool) -> tuple[Tensor, ...]:
        states = RowStates(convolution.to(dtype, copy=True), recurrent_state.clone())
        mixer.to(dtype)
        with torch.no_grad():
            if is_own:
                output = RecurrentMixer(mixer)(hidden.to(dtype), cache_params=Held(states))
            else:
                output = mixer(hidden.to(dtype), cache_params=states)
        return (output.float(), *(state.float() for state in states.tensors))

    expected = run(torch.float32, is_own=False)
    assert not torch.allclose(expected[2], recurrent_state)
    assert not calls, "transformers' own mixers are as they were"
    for found, other in zip(run(torch.float32, is_own=True), expected, strict=True):
        torch.testing.assert_close(found, other, atol=1e-4, rtol=1e-4)
    step = ["causal_conv1d_update", "mamba2_selective_state_update"]
    assert calls == (step if num_tokens == 1 else ["causal_conv1d_fn"])
    own, others = (run(torch.bfloat16, is_own=is_own) for is_own in (True, False))
    for found, other, exact in zip(own, others, expected, strict=True):
        assert (found - exact).square().mean() <= 1.05 * (other - exact).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_slots_updates_those_of_live_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    mixer = falcon(mamba_rms_norm=False).to(dtype).eval()
    hidden = torch.randn(ROWS, 1, WIDTH, dtype=dtype)
    before = (
        torch.randn(ROWS + 1, mixer.conv1d.in_channels, mixer.conv1d.kernel_size[0], dtype=dtype),
        torch.randn(ROWS + 1, HEADS, HEAD, NUMBERS),
    )
    alone = RowStates(*(state[:ROWS].clone() for state in before))
    is_live = torch.arange(ROWS) != 1
    slots = tuple(state.clone() for state in before)
    for states in (slots, before):
        states[1][1] = torch.nan
    hidden[1] = torch.nan

    class Slots:
        def mix(self, layer: int, mixer: Mix, hidden: Tensor) -> Tensor:  # noqa: ARG002
            assert mixer.steps_live_states
            return mix_live_rows(mixer, hidden, slots, is_live)

    with torch.no_grad():
        expected = RecurrentMixer(mixer)(hidden, cache_params=Held(alone))
        output = RecurrentMixer(mixer)(hidden, cache_params=Slots())
    assert torch.equal(output[is_live], expected[is_live])
    for found, updated, old in zip(slots, alone.tensors, before, strict=True):
        assert torch.equal(found[:ROWS][is_live], updated[is_live])
        assert not torch.equal(found[:ROWS][is_live], old[:ROWS][is_live])
        for idle in (1, ROWS):
            torch.testing.assert_close(found[idle], old[idle], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("is_fast", "names"),
    [
        (True, {"mamba2_selective_state_update"}),
        (False, {"mamba2_selective_state_update", "causal_conv1d_fn", "causal_conv1d_update"}),
    ],
)
def test_functions_are_replaced_where_they_are_slow(
    is_fast: bool, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "multiplies", lambda _dtype: is_fast)
    mixer = falcon(mamba_rms_norm=False)
    replaced = RecurrentMixer(mixer)._forward.__globals__
    original = inspect.unwrap(FalconH1Mixer.forward).__globals__
    functions = {**recurrent._STEPS, **recurrent._CONVOLUTIONS}
    assert {name for name in functions if replaced[name] is functions[name]} == names
    assert not any(original.get(name) is function for name, function in functions.items())
    on_device = RecurrentMixer(mixer.to("meta"))._forward
    assert on_device is inspect.unwrap(FalconH1Mixer.forward)


@pytest.mark.parametrize(("model_type", "name"), recurrent._MIXERS.items())
def test_every_mixer_calls_the_functions_that_are_replaced(model_type: str, name: str) -> None:
    """A name that transformers changed would turn ours off without an error."""
    package = model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    called = set(inspect.unwrap(getattr(module, name).forward).__code__.co_names)
    assert recurrent._CONVOLUTIONS.keys() <= called
    has_mamba2 = model_type in ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")
    assert (recurrent._STEPS.keys() <= called) == has_mamba2
