"""Layers with a state of fixed size: short convolutions, Mamba-2, gated delta nets.

The part of a layer that has the state is its mixer. transformers' code computes it, except what is slow on
a CPU. What it finds as its cache are the states of a call's rows: a cache of this backend copies them out of
slots or scratches, and back where a row has tokens. Our step of Mamba-2 updates a slot's states where they
are, since they are as large as thousands of keys and values.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from backends.torch_backend.torch_private import onednn

# The mixers, by transformers' names of model types.
_MIXERS = {
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "lfm3": "Lfm3ShortConv",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
}
RECURRENT_MODEL_TYPES = frozenset(_MIXERS)

_CACHE_NAMES = ("past_key_values", "cache_params")  # the parameter of a mixer that takes its cache


class Advance(Protocol):
    """`advance_states`, or a kernel that does the same."""

    def __call__(
        self, states: Tensor, is_live: Tensor, decay: Tensor, added: Tensor, writes: Tensor, reads: Tensor
    ) -> Tensor: ...


class LiveStates(NamedTuple):
    """All slots' states [slot, …]: `advance` steps those of the first ones, where `is_live` [row]."""

    states: Tensor
    is_live: Tensor
    advance: Advance


class RowStates:
    """The states of a call's rows as a mixer reads and updates them, in transformers' words.

    `convolution` [row, channel, width] are the last inputs of a convolution, `recurrent` [row, …] is float32.
    Without states, the rows are at the beginning of their sequences. Where a mixer steps `LiveStates`, these
    are its recurrent states.
    """

    def __init__(
        self, convolution: Tensor | None = None, recurrent: Tensor | LiveStates | None = None
    ) -> None:
        self._convolution = convolution
        self._recurrent = recurrent

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The states that there are, in the order of the constructor's arguments, but for `LiveStates`."""
        return tuple(state for state in (self._convolution, self._recurrent) if isinstance(state, Tensor))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        """Return a convolution's last inputs, which a mixer may update in place."""
        return self._convolution

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,  # noqa: ARG002
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Append a convolution's inputs [row, channel, token]; return them with those before them."""
        num_tokens = conv_states.shape[2]
        width = conv_kernel_size or num_tokens
        if self._convolution is None:
            inputs = functional.pad(conv_states, (max(width - num_tokens, 0), 0))
        else:
            width = self._convolution.shape[2]
            inputs = torch.cat([self._convolution, conv_states], dim=2)
        self._convolution = inputs[:, :, -width:]
        return inputs

    def get_recurrent_state(
        self,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,  # noqa: ARG002
    ) -> Tensor | LiveStates | None:
        """Return the recurrent state, which a mixer may update in place."""
        return self._recurrent

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,  # noqa: ARG002
    ) -> Tensor:
        """Replace the recurrent state."""
        self._recurrent = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        """Return False: no token is ever taken back."""
        return False


@dataclass(frozen=True, slots=True)
class Mix:
    """A mixer as a cache calls it. With `steps_live_states`, its step takes `LiveStates`."""

    mixer: nn.Module
    forward: FunctionType
    cache_name: str  # the parameter that takes its cache
    steps_live_states: bool

    def __call__(self, hidden: Tensor, states: RowStates) -> Tensor:
        """Return the output [row, token, width] for hidden states of that shape, and update the states."""
        output: Tensor = self.forward(self.mixer, hidden, **{self.cache_name: states})
        return output


class RecurrentCache(Protocol):
    """The cache that `RecurrentMixer` calls."""

    def mix(self, layer: int, mixer: Mix, hidden: Tensor) -> Tensor:
        """Return a mixer's output [row, token, width] with the states that the cache has for the layer."""
        ...


class RecurrentMixer(nn.Module):
    """Replaces a mixer of `_MIXERS`, and runs it as the cache says."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self._forward = _forward_of(mixer)
        self._steps_live_states = _steps_live_states(self._forward)
        self.layer_idx: int = mixer.layer_idx  # type: ignore[assignment]

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: object
    ) -> Tensor:
        if attention_mask is not None:
            raise NotImplementedError("a recurrent layer with a mask of padding")
        name = next(name for name in _CACHE_NAMES if name in kwargs)
        cache: RecurrentCache = kwargs[name]  # type: ignore[assignment]
        mix = Mix(self.mixer, self._forward, name, self._steps_live_states)
        return cache.mix(self.layer_idx, mix, hidden_states)


def _steps_live_states(forward: FunctionType) -> bool:
    """Return whether a mixer's forward function calls a step of `_STEPS`."""
    return any(
        name in forward.__code__.co_names and forward.__globals__.get(name) is step
        for name, step in _STEPS.items()
    )


def _forward_of(mixer: nn.Module) -> FunctionType:
    """Return the forward function of a mixer, with functions of `_STEPS` and `_CONVOLUTIONS` where they pay.

    It is a copy with other globals, so that transformers' models stay as they are. On other devices than a
    CPU, and where a convolution in the mixer's type is fast, transformers' functions are called: ours were
    not measured there.
    """
    parameter = next(mixer.parameters())
    functions: dict[str, Callable[..., Tensor]] = {}
    if parameter.device.type == "cpu":
        functions |= _STEPS
        if onednn.is_slow(parameter):
            functions |= _CONVOLUTIONS
    forward = inspect.unwrap(type(mixer).forward)
    assert isinstance(forward, FunctionType)
    if not functions:
        return forward
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, **functions},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return own


def _convolve_token(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Append a token's inputs [row, channel, 1] to the last ones, in place; return its outputs."""
    inputs = torch.cat([conv_state, hidden_states], dim=-1)
    conv_state.copy_(inputs[:, :, -conv_state.shape[-1] :])
    # No convolution: compiled, this sum is fused with its neighbours.
    outputs = (inputs[:, :, -weight.shape[1] :].float() * weight.float()).sum(-1, keepdim=True)
    outputs = (outputs if bias is None else outputs + bias[:, None]).to(weight.dtype)
    return (outputs if activation is None else ACT2FN[activation](outputs)).to(hidden_states.dtype)


def _convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Return the outputs of a sequence's inputs [row, channel, token], before which are zeros.

    In bfloat16, torch's convolution takes 2 to 70 times as long on a CPU without such products.
    """
    inputs = functional.pad(hidden_states.float(), (weight.shape[1] - 1, 0))
    factors, offsets = weight.float().unsqueeze(1), None if bias is None else bias.float()
    outputs = functional.conv1d(inputs, factors, offsets, groups=weight.shape[0]).to(weight.dtype)
    return (outputs if activation is None else ACT2FN[activation](outputs)).to(hidden_states.dtype)


def _mamba2_step(
    state: Tensor | LiveStates,
    inputs: Tensor,
    time_steps: Tensor,
    rates: Tensor,
    writes: Tensor,
    reads: Tensor,
    skip: Tensor,
    *,
    dt_bias: Tensor,
    dt_softplus: bool,
    z: Tensor | None = None,
) -> Tensor:
    """Return a token's outputs [row, head, channel], and update the states [row, head, channel, number].

    In the paper's letters, `inputs` are x and `time_steps` Δ [row, head, channel], `rates` A [head, channel,
    number], `writes` B and `reads` C [row, group, number], `skip` D, and `dt_bias` is added to Δ: both are
    [head, channel]. transformers' function takes an exponential for each number of the state. Its callers
    expand Δ and A from one number a head, so one exponential a head is enough.
    """
    assert dt_softplus, "all callers set it"
    if isinstance(state, LiveStates):
        live = state
    else:
        is_live = torch.ones(inputs.shape[0], dtype=torch.bool, device=inputs.device)
        live = LiveStates(state, is_live, advance_states)
    sizes = functional.softplus(time_steps[..., 0] + dt_bias[:, 0].to(time_steps.dtype)).float()
    decay = torch.exp(sizes * rates[:, 0, 0].float())
    added = sizes[..., None] * inputs.float()
    output = live.advance(live.states, live.is_live, decay, added, writes.float(), reads.float())
    output = output + inputs.float() * skip
    if z is not None:
        output = output * functional.silu(z.float())
    return output.to(inputs.dtype)


def advance_states(
    states: Tensor, is_live: Tensor, decay: Tensor, added: Tensor, writes: Tensor, reads: Tensor
) -> Tensor:
    """Step the states of live rows in place; return the outputs [row, head, channel] from the new ones.

    `states` are [slot, head, channel, number], where row i has slot i, and `is_live` [row]. A state is
    multiplied by `decay` [row, head], then the product of `added` [row, head, channel] and `writes` [row,
    group, number] is added. All are float32. An output is the product of the state with `reads` [row, group,
    number]; those of other rows are never read.
    """
    num_rows, num_groups, num_numbers = writes.shape
    held = states[:num_rows].view(num_rows, num_groups, -1, states.shape[2], num_numbers)
    new = held * decay.view(num_rows, num_groups, -1, 1, 1)
    new = new + added.view(held.shape[:-1])[..., None] * writes[:, :, None, None]
    held.copy_(torch.where(is_live.view(-1, 1, 1, 1, 1), new, held))
    return (new * reads[:, :, None, None]).sum(-1).view(added.shape)


# By transformers' names of the functions that they replace. They are called as those are.
_STEPS: Final[Mapping[str, Callable[..., Tensor]]] = {"mamba2_selective_state_update": _mamba2_step}
_CONVOLUTIONS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "causal_conv1d_fn": _convolve,
    "causal_conv1d_update": _convolve_token,
}


def replace_recurrent_mixers(model: PreTrainedModel) -> None:
    """Replace the mixers of a model whose layers have states. Other models stay as they are."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ in _MIXERS.values():
                setattr(module, name, RecurrentMixer(child))


def mix_live_rows(
    mixer: Mix, hidden: Tensor, slots: Sequence[Tensor], is_live: Tensor, advance: Advance = advance_states
) -> Tensor:
    """Run a mixer for one token of each of the first slots; return its output [row, 1, width].

    `slots` are the states of all slots, [slot, …], of which those of live rows (`is_live` [row]) are updated
    in place, by `advance` where the mixer can. Shapes do not depend on how many rows are live.
    """
    held = [state[: hidden.shape[0]] for state in slots]
    if mixer.steps_live_states:
        del held[1]
        states = RowStates(held[0].clone(), LiveStates(slots[1], is_live, advance))
    else:
        states = RowStates(*(state.clone() for state in held))
    output = mixer(hidden, states)
    for old, new in zip(held, states.tensors, strict=True):
        old.copy_(torch.where(is_live.view(-1, *(1,) * (old.dim() - 1)), new, old))
    return output
