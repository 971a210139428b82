"""The sub-command `check`: whether a model is served, and what its slots take, from its configuration alone.

It reads no weights. The model is built without memory (a few types need random weights), and the same probe
that the server runs finds the sizes of its keys and values.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from backends.checkpoint import gguf_file, is_hub_file
from backends.options import Count, OptionGroup, Shown, Tokens
from commands.shared.table import table
from server.options.command_line import OptionError, add_options, groups_of, read_options
from server.options.models import Model, named_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from backends.torch_backend.model.probe import LayerSpec

_CAPACITIES = (1024, 2048, 4096, 8192, 16384, 32768)
_GB = 1e9


class SizeOptions(OptionGroup):
    """What the table of memory is for."""

    title: ClassVar[str] = "Sizes"
    prefix: ClassVar[str] = "SNAPSERVE_CHECK_"

    num_slots: Count = 8
    """Slots of the table's last column."""
    max_model_len: Annotated[Tokens | None, Shown(default="as the server's")] = None
    """Longest sequence, prompt and answer."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    sizes: SizeOptions


@dataclass(frozen=True, slots=True)
class _Subject:
    """A model that is served."""

    config: "PreTrainedConfig"
    dtype: str
    num_parameters: int
    num_weight_bytes: int
    layers: "Sequence[LayerSpec]"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id or a GGUF file")
    add_options(parser, groups_of(CheckOptions))


def run(arguments: argparse.Namespace) -> int:
    """Return 0 for a model that is served, else 1. Raises `OptionError`."""
    sizes = read_options(CheckOptions, arguments, os.environ).sizes
    model = _folder(arguments.model)
    # torch and transformers would slow down every other sub-command.
    from backends.errors import ModelLoadError

    try:
        subject = _read(model)
    except ModelLoadError as error:
        print(f"{arguments.model}: not served\n  {error}")
        return 1
    print(f"{arguments.model}: served")
    print("\n".join(f"  {line}" for line in _described(subject, sizes)))
    return 0


def _folder(name: str) -> str:
    """Return the folder, hub id or GGUF file of a model. Raises `OptionError`."""
    from pydantic import TypeAdapter, ValidationError

    try:
        model: str = TypeAdapter(Model).validate_python(named_model(name) or name)
    except ValidationError as error:
        raise OptionError(f"MODEL must be {error.errors()[0]['ctx']['error']}, got {name!r}") from error
    if is_hub_file(model) and not Path(model).exists():
        raise OptionError(f"{name} is a file on the hub with its weights: download it first")
    return model


def _read(model: str) -> _Subject:
    """Raises ModelLoadError for a model that is not served."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from backends.errors import ModelLoadError
    from backends.torch_backend.config import DtypeName
    from backends.torch_backend.errors import UnsupportedModelError
    from backends.torch_backend.model.attention import ATTENTION_NAME, register_attention
    from backends.torch_backend.model.latent import replace_latent_attention
    from backends.torch_backend.model.loading import check_config, decoder_class, resolve_dtype
    from backends.torch_backend.model.probe import probe_layers
    from backends.torch_backend.model.recurrent import replace_recurrent_mixers

    file = gguf_file(model)
    try:
        if file is not None:
            from backends.torch_backend.model.gguf_file import read_config

            config = read_config(file)
        else:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"it has no configuration that transformers can read: {error}") from error
    check_config(config)
    decoder_class(config)
    dtype = resolve_dtype(DtypeName.AUTO, config, torch.device("cpu"))
    register_attention()

    def probed(device: str) -> "tuple[int, Sequence[LayerSpec]]":
        # In bfloat16, since grouped products of experts take no other type without memory.
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
            ).eval()
        num_parameters: int = model.num_parameters()
        replace_latent_attention(model)
        replace_recurrent_mixers(model)
        return num_parameters, [_of_dtype(layer, dtype) for layer in probe_layers(model)]

    try:
        num_parameters, layers = probed("meta")
    except UnsupportedModelError as error:
        # The probe of a few types, such as GPT-2, looks at numbers, which a model without memory has not.
        if "meta" not in str(error):
            raise
        num_parameters, layers = probed("cpu")  # with random weights
    name = str(dtype).removeprefix("torch.")
    return _Subject(config, name, num_parameters, num_parameters * dtype.itemsize, layers)


def _of_dtype(layer: "LayerSpec", dtype: "torch.dtype") -> "LayerSpec":
    """Return a layer that was probed in bfloat16 as it is in another type."""
    import torch

    planes = (
        replace(plane, dtype=dtype) if plane.dtype is torch.bfloat16 else plane for plane in layer.planes
    )
    return replace(layer, planes=tuple(planes))


def _described(subject: _Subject, sizes: SizeOptions) -> Iterator[str]:
    from backends.host_memory import available_bytes
    from backends.torch_backend.model.lengths import longest_sequence

    config = subject.config
    limit = longest_sequence(config)
    if sizes.max_model_len is not None and sizes.max_model_len > limit:
        raise OptionError(f"--max-model-len must be at most the model's {limit}, got {sizes.max_model_len}")
    length = sizes.max_model_len or _default_length(subject, limit, sizes.num_slots)
    available = available_bytes()
    yield f"type          {config.model_type}, {config.num_hidden_layers} layers"
    parameters = f"{subject.num_parameters / 1e6:,.0f} million parameters"
    yield f"weights       {subject.num_weight_bytes / _GB:.2f} GB: {parameters} in {subject.dtype}"
    yield f"sequences     up to {limit} tokens; here {length}"
    if available is not None:
        yield f"this machine  {available / _GB:.1f} GB of memory available"
    yield ""
    yield from _slots(subject.layers, length, sizes.num_slots).splitlines()


def _default_length(subject: _Subject, limit: int, num_slots: int) -> int:
    """Return the longest sequence that the server would choose on this machine's CPU."""
    import torch

    from backends.torch_backend.config import TorchBackendConfig
    from backends.torch_backend.memory import fitting_length
    from cache.pool_options import PoolOptions

    config = TorchBackendConfig("", (PoolOptions(num_slots),), fills_memory=True, prefix_cache_bytes=None)
    return fitting_length(config, subject.layers, limit, torch.device("cpu"), subject.num_weight_bytes)


def _slots(layers: "Sequence[LayerSpec]", length: int, num_slots: int) -> str:
    from backends.torch_backend.memory import slot_bytes
    from cache.policy import PolicyName
    from cache.policy_options import PolicyOptions
    from cache.pool_options import KVCacheDtype, PoolOptions

    policies = [
        PolicyOptions(PolicyName.SNAPSTREAM, slot_capacity=capacity)
        for capacity in _CAPACITIES
        if capacity < length
    ]
    rows = []
    for policy in (*policies, PolicyOptions(PolicyName.FULL)):
        cells = [
            f"{slot_bytes(PoolOptions(count, policy, kv_cache_dtype=kind), layers, length) / _GB:.3f} GB"
            for kind in (KVCacheDtype.AUTO, KVCacheDtype.INT8)
            for count in (1, num_slots)
        ]
        rows.append([policy.name.value, str(policy.slot_capacity or length), *cells])
    many = f"{num_slots} slots"
    return table(["policy", "entries", "a slot", many, "a slot, 8 bits", f"{many}, 8 bits"], rows)
