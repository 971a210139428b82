"""What a torch backend is built from."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from backends.checkpoint import CACHE
from backends.config import BackendConfig
from backends.options import Folder, OptionGroup, Shown

DEFAULT_COMPILE_CACHE = CACHE


class DeviceName(enum.StrEnum):
    AUTO = "auto"  # CUDA where there is one
    CPU = "cpu"
    CUDA = "cuda"


class DtypeName(enum.StrEnum):
    AUTO = "auto"  # the checkpoint's own; float32 for a float16 checkpoint on a CPU
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantization(enum.StrEnum):
    NONE = "none"
    INT8 = "int8"  # the weights of linear layers, with a scale for each output
    W8A8 = "w8a8"  # their inputs too, with a scale for each row
    INT4 = "int4"  # weights in 4 bits and inputs in int8, with a scale for each group of 32 inputs


@dataclass(frozen=True, slots=True)
class TorchBackendConfig(BackendConfig):
    """Decode steps of a compiled backend run on CUDA as graphs that are captured at warm-up, of layers that
    torch compiles. On a CPU they run as code that is read from `compile_cache`, or compiled in the
    background; with `require_compiled`, during warm-up.
    """

    device: DeviceName = DeviceName.AUTO
    dtype: DtypeName = DtypeName.AUTO
    quantization: Quantization = Quantization.NONE
    compile: bool = False
    compile_cache: Path = DEFAULT_COMPILE_CACHE
    require_compiled: bool = False

    def __post_init__(self) -> None:
        BackendConfig.__post_init__(self)
        if self.require_compiled and not self.compile:
            raise ValueError("require_compiled needs compile")


class TorchOptions(OptionGroup):
    """The options of `--backend torch`."""

    title: ClassVar[str] = "Model on PyTorch (`--backend torch`)"

    device: DeviceName = DeviceName.AUTO
    """Where the model runs."""
    dtype: DtypeName = DtypeName.AUTO
    """Type of weights and cache; auto is the checkpoint's own."""
    quantization: Quantization = Quantization.NONE
    """How linear layers compute: int8 halves their weights, w8a8 multiplies in int8 too, int4 leaves 0.3 of
    them, or half of the output layer. What they cost: performance.md."""
    compile: bool = True
    """Whether decode steps run as CUDA graphs on a GPU, compiled and captured before the server is ready, and
    on a CPU as code compiled for it, in the background."""
    compile_cache: Annotated[Folder, Shown(default="~/.cache/snapserve")] = DEFAULT_COMPILE_CACHE
    """Where compiled code is stored. What another user owns, or could have written, is not loaded."""
    require_compiled: bool = False
    """Whether the server is ready only once decode is compiled, and ends if it cannot be."""
