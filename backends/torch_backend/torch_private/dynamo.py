"""torch.compile of a model's layers while their decode steps are captured.

A captured step costs the device a launch for each small operation: norms, rotations, activations. Compiled,
neighbours of them are one kernel. Importing this takes about a second.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch, to itself
    import torch._inductor.compile_fx


@contextmanager
def compiled_layers(
    layers: nn.ModuleList, cache: object, methods: Sequence[str], folder: Path
) -> Iterator[None]:
    """Compile the layers for the time of the context, for any number of rows.

    The `methods` of `cache`, which the layers call, run as they are. So does what torch cannot compile; its
    log says why. The code is stored in `folder`, unless TORCHINDUCTOR_CACHE_DIR names another one.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    originals = [*layers]
    options = torch._dynamo.config.patch(
        suppress_errors=True,
        # The number of a layer must not make its code another one than its neighbour's.
        allow_unspec_int_on_nn_module=True,
    )
    for name in methods:
        setattr(cache, name, torch.compiler.disable(getattr(cache, name)))  # type: ignore[no-untyped-call]
    for index, layer in enumerate(originals):
        compiled: Any = torch.compile(layer, dynamic=True)
        layers[index] = compiled
    try:
        with options:
            yield
    finally:
        for index, layer in enumerate(originals):
            layers[index] = layer
        for name in methods:
            delattr(cache, name)
