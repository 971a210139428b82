"""Converts a GGUF file to a folder that transformers loads: bfloat16 weights, config and tokenizer.

transformers reads the file, with its own mapping of names and its own tokenizer. This module adds what it
leaves out: the tokens that end a turn, the scaling of rotary embeddings, and errors that say what is wrong.
"""

import functools
import logging
import math
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import gguf
import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    modeling_gguf_pytorch_utils,
    modeling_utils,
)
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.utils.logging import disable_progress_bar
from transformers.utils.quantization_config import GgufConfig

from backends.torch_backend.errors import ModelLoadError, UnsupportedModelError
from backends.torch_backend.model.loading import check_config, check_weights, decoder_class

logger = logging.getLogger(__name__)

_Read = TypeVar("_Read")

# What transformers and the GGUF readers raise for a file that is cut off or damaged.
_READ_ERRORS: Final = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError, struct.error,
)  # fmt: skip
# Control tokens that end a turn in published chat templates. A file names only one of its end tokens.
_END_OF_TURN: Final = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>"}
)
_CONTROL: Final = 3  # GGUF's type of a control token
_MAX_ROPE_ERROR: Final = 1e-3


def convert(file: Path, folder: Path) -> None:
    """Write a file's model to a folder.

    Raises `ModelLoadError`, or `UnsupportedModelError` for a model that cannot be served. Raises OSError if
    the folder cannot be written.
    """
    metadata = _read(file, lambda: _metadata(file))
    _check_space(folder, _read(file, lambda: _num_weights(file)))
    logger.info(
        "converting %s (%.0f MB) to bfloat16 weights in %s: once, later starts read these",
        file, file.stat().st_size / 1e6, folder.parent,
    )  # fmt: skip
    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]
    with _adapted_reader():
        config = _read(file, lambda: _config(file, metadata))
        tokenizer = _read(file, lambda: AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
        model = _load(file, config)
    model.generation_config.eos_token_id = _end_tokens(metadata)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(f"safetensors: {error}") from error
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    logger.info("converted %s: %.0f MB", file, num_bytes / 1e6)


def read_config(file: Path) -> PreTrainedConfig:
    """Return the configuration of a file's model, without its weights.

    Raises `ModelLoadError`, or `UnsupportedModelError` for a model that cannot be served.
    """
    metadata = _read(file, lambda: _metadata(file))
    with _adapted_reader():
        config = _read(file, lambda: _config(file, metadata))
    config.dtype = torch.bfloat16
    return config


def _read(file: Path, read: Callable[[], _Read]) -> _Read:
    """Return what `read` reads from a file. Raises `ModelLoadError`."""
    try:
        return read()
    except _READ_ERRORS as error:
        raise ModelLoadError(
            f"{file} cannot be read as GGUF, is it complete? {type(error).__name__}: {error}"
        ) from error


def _metadata(file: Path) -> Mapping[str, Any]:
    """Return a file's metadata, with `tensors`, the names of its tensors. Raises `ModelLoadError`."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelLoadError(f"{file} is no GGUF file: it must start with the bytes GGUF")
    metadata, names = read_gguf_metadata(str(file), ("tokenizer.ggml.tokens",))
    if "tokenizer.ggml.model" not in metadata or "tokenizer.ggml.tokens" not in metadata:
        raise ModelLoadError(f"{file} has no tokenizer: its metadata lacks tokenizer.ggml.model or .tokens")
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{file} is one of {metadata['split.count']} parts: join them with llama-gguf-split --merge"
        )
    return {**metadata, "tensors": names}


def _num_weights(file: Path) -> int:
    return sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(str(file)).tensors)


def _check_space(folder: Path, num_weights: int) -> None:
    """Raise OSError if the disk cannot hold the converted model."""
    free = shutil.disk_usage(folder).free
    needed = 2 * num_weights  # bfloat16
    if free < needed:
        raise OSError(f"{free / 1e6:.0f} MB are free, and {needed / 1e6:.0f} MB are needed")


def _config(file: Path, metadata: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the model's configuration. Raises `UnsupportedModelError` for one that cannot be served."""
    architecture = metadata["general.architecture"]
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except ValueError as error:
        if "architecture" not in str(error):
            raise
        raise UnsupportedModelError(
            f"{file}: transformers cannot read GGUF files of architecture {architecture!r}"
        ) from error
    check_config(config)
    decoder_class(config)
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" and "rope_freqs.weight" not in metadata["tensors"]:
        raise UnsupportedModelError(
            f"{file}: transformers does not read rope scaling of type {scaling!r} from GGUF files"
        )
    if any(name.startswith("rope_factors_") for name in metadata["tensors"]):
        raise UnsupportedModelError(
            f"{file}: transformers does not read rope_factors_long and rope_factors_short from GGUF files"
        )
    _check_rotary_width(file, config, metadata.get(f"{architecture}.rope.dimension_count"))
    if "rope_freqs.weight" in metadata["tensors"]:
        _set_llama3_rope(file, config)
    return config


def _check_rotary_width(file: Path, config: PreTrainedConfig, width: int | None) -> None:
    """Raise `UnsupportedModelError` where the file rotates another part of a head than the config says."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # Without a theta of their own: parameters for each type of layer, or no rotary positions.
    if width is None or "rope_theta" not in parameters or hasattr(config, "kv_lora_rank"):
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width != int(head_dim * parameters.get("partial_rotary_factor", 1.0)):
        raise UnsupportedModelError(
            f"{file}: rotary positions turn {width} of a head's {head_dim} numbers, "
            "and transformers does not read that from GGUF files"
        )


def _set_llama3_rope(file: Path, config: PreTrainedConfig) -> None:
    """Set the rotary scaling of Llama 3.1 and later, which a file has as one divisor for each frequency.

    transformers ignores these divisors. The scaling's factor is the largest of them, and its other parameters
    have been the same in every release. Raises `UnsupportedModelError` if they do not give the divisors.
    """
    tensors = gguf.GGUFReader(str(file)).tensors
    divisors = torch.tensor(next(each.data for each in tensors if each.name == "rope_freqs.weight").copy())
    parameters = {
        **config.rope_parameters,
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not torch.allclose(_llama3_divisors(parameters, len(divisors)), divisors, rtol=_MAX_ROPE_ERROR):
        raise UnsupportedModelError(f"{file}: rope_freqs.weight is not the scaling of Llama 3.1")
    config.rope_parameters = parameters


def _llama3_divisors(parameters: Mapping[str, Any], num_frequencies: int) -> Tensor:
    """Return the divisor of each frequency in Llama 3.1's scaling."""
    exponents = torch.arange(num_frequencies) / num_frequencies
    wavelengths = 2 * math.pi * parameters["rope_theta"] ** exponents
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    share = (parameters["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    share = share.clamp(0, 1)
    divisors: Tensor = 1 / ((1 - share) / parameters["factor"] + share)
    return divisors


def _load(file: Path, config: PreTrainedConfig) -> Any:
    """Return the file's model in bfloat16. Raises `ModelLoadError`."""

    def load() -> Any:
        model_class: Any = decoder_class(config)
        return model_class.from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=config,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            ignore_mismatched_sizes=True,  # reported, and refused below with the weight's name
            output_loading_info=True,
        )

    model, report = _read(file, load)
    check_weights(str(file), report)
    return model


@contextmanager
def _adapted_reader() -> Iterator[None]:
    """Adapt transformers' reader of GGUF files.

    It only checks that the package accelerate is present, and does not use it. It parses the file three
    times, and makes the table of tensor names once for each module, which takes most of its time. Its
    progress bar would fill a log file.
    """
    with (
        _replaced(modeling_utils, "is_accelerate_available", lambda *_: True),
        _replaced(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        _replaced(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        _replaced(modeling_gguf_pytorch_utils, "tqdm", functools.partial(tqdm, disable=None)),
    ):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)


def _end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end an answer, the end of the text first."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type", ())
    ids += [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_OF_TURN
    ]
    return list(dict.fromkeys(each for each in ids if each is not None))
