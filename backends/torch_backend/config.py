"""What a torch backend is built from."""

import enum
import os
from dataclasses import dataclass
from pathlib import Path

from cache.pool_options import PoolOptions, check_names

DEFAULT_MAX_MODEL_LEN = 16384
DEFAULT_COMPILE_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "snapserve"


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
    W8A8 = "w8a8"  # what they multiply too, with a scale for each row


@dataclass(frozen=True, slots=True)
class TorchBackendConfig:
    """`model` is a local folder or a hub id. `max_model_len` None is the model's own limit, at most `DEFAULT_MAX_MODEL_LEN`."""

    model: str
    device: DeviceName = DeviceName.AUTO
    dtype: DtypeName = DtypeName.AUTO
    quantization: Quantization = Quantization.NONE
    pools: tuple[PoolOptions, ...] = (PoolOptions(),)
    max_model_len: int | None = None
    num_scratch: int = 2
    scratch_capacity: int | None = None  # None: a scratch holds any prompt
    prefill_chunk: int = 512  # tokens that one prefill step reads, all rows together
    # Decode steps run on CUDA as graphs captured at warm-up, on a CPU as code that is found in the cache or compiled in the background.
    compile: bool = False
    compile_cache: Path = DEFAULT_COMPILE_CACHE

    def __post_init__(self) -> None:
        check_names(self.pools)
        for name in ("num_scratch", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.scratch_capacity is not None and self.scratch_capacity < 1:
            raise ValueError(f"scratch_capacity must be at least 1, got {self.scratch_capacity}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, got {self.max_model_len}")
