"""Mixers of Mamba-2 with our functions: transformers' mixers of every such family are the reference."""

from collections.abc import Callable
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

from backends.torch_backend.model.recurrent import Mix, RecurrentMixer, RowStates

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
    mixer.mup_vector = torch.rand(1, 1, mixer.in_proj.out_features) + 0.5
    return mixer


class Held:
    """A cache that has the states of one layer."""

    def __init__(self, states: RowStates) -> None:
        self.states = states

    def mix(self, layer: int, mixer: Mix, hidden: Tensor) -> Tensor:
        assert layer == 0
        return mixer(hidden, self.states)


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_states_are_those_of_transformers(family: str, num_tokens: int) -> None:
    torch.manual_seed(0)
    mixer = FAMILIES[family]().eval()
    for parameter in mixer.parameters():
        parameter.data.normal_(std=0.5)  # no heads or channels alike
    mixer.to(torch.bfloat16)  # so that all runs have the same weights and inputs
    hidden = torch.randn(ROWS, num_tokens, WIDTH).bfloat16()
    convolution = torch.randn(ROWS, mixer.conv1d.in_channels, mixer.conv1d.kernel_size[0]).bfloat16()
    recurrent = torch.randn(ROWS, HEADS, HEAD, NUMBERS)

    def run(dtype: torch.dtype, *, is_own: bool) -> tuple[Tensor, ...]:
        states = RowStates(convolution.to(dtype, copy=True), recurrent.clone())
        mixer.to(dtype)
        with torch.no_grad():
            if is_own:
                output = RecurrentMixer(mixer)(hidden.to(dtype), cache_params=Held(states))
            else:
                output = mixer(hidden.to(dtype), cache_params=states)
        return (output.float(), *(state.float() for state in states.tensors))

    expected = run(torch.float32, is_own=False)
    assert not torch.allclose(expected[2], recurrent)
    for found, other in zip(run(torch.float32, is_own=True), expected, strict=True):
        torch.testing.assert_close(found, other, atol=1e-4, rtol=1e-4)
    own, others = (run(torch.bfloat16, is_own=is_own) for is_own in (True, False))
    for found, other, exact in zip(own, others, expected, strict=True):
        assert (found - exact).square().mean() <= (other - exact).square().mean()
