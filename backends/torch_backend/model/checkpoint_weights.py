"""The weights of a quantised checkpoint as a state dict whose tensors are read when they are indexed.

transformers loads it as it loads files: it renames, joins and splits the weights of each model type. A weight
is dequantised when it is its turn, so that no more than a few quantised weights are in memory.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from backends.torch_backend.errors import ModelLoadError
from backends.torch_backend.model.dequantization import UNUSED, Layout


class _Stored(Protocol):
    """What `safe_open` gives for a tensor, and what transformers expects."""

    def __getitem__(self, index: EllipsisType) -> Tensor: ...


class DequantizedWeight:
    """A weight that is dequantised each time it is indexed."""

    def __init__(self, layout: Layout, parts: Mapping[str, _Stored], dtype: torch.dtype) -> None:
        self._layout = layout
        self._parts = parts
        self._dtype = dtype

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self._layout.dequantize({name: part[...] for name, part in self._parts.items()}, self._dtype)


def dequantized_weights(name: str, layouts: tuple[Layout, ...], dtype: torch.dtype) -> dict[str, _Stored]:
    """Return the weights of a checkpoint in a folder or on the hub, those of `layouts` in `dtype`.

    Raises OSError for files that cannot be read, and ModelLoadError for incomplete weights.
    """
    stored = {key: value for file in _files(name) for key, value in _tensors(file)}
    weights: dict[str, _Stored] = {}
    for layout in layouts:
        for key in [key for key in stored if key.endswith(layout.marker)]:
            stem = key.removesuffix(layout.marker)
            missing = [stem + ending for ending in layout.needed if stem + ending not in stored]
            if missing:
                raise ModelLoadError(f"{name} has {key}, and lacks {', '.join(missing)}")
            endings = (layout.marker, *layout.needed, *layout.optional)
            parts = {ending: stored.pop(stem + ending) for ending in endings if stem + ending in stored}
            weights[stem + layout.weight] = DequantizedWeight(layout, parts, dtype)
    return {key: value for key, value in stored.items() if not key.endswith(UNUSED)} | weights


def _files(name: str) -> list[str]:
    """Return the paths of a checkpoint's files. Raises OSError."""
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        names = [SAFE_WEIGHTS_NAME]
    else:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    return [str(cached_file(name, each)) for each in names]


def _tensors(file: str) -> Iterator[tuple[str, Any]]:
    # Without a memory map: the pages of one would count as memory until the last weight is read.
    opened: Any = safe_open(file, framework="pt", device="cpu", backend="pread")
    for key in opened.keys():  # noqa: SIM118 (it is no mapping)
        yield key, opened.get_slice(key)
