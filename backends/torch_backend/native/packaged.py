"""The kernels that are built with the package, for several instruction sets.

`python -m backends.torch_backend.native.packaged FOLDER` builds them all. A server uses the library of the
best set that its processor has, if it was built from the same sources for the same torch.
"""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from backends.torch_backend.native.kernels import (
    FLAGS,
    INSTRUCTION_SETS,
    build_kernels,
    instruction_set,
    sources,
)

FOLDER: Final = Path(__file__).parent / "built"


def packaged_kernels(folder: Path = FOLDER) -> Path | None:
    """Return the library for this processor, these sources and this torch, if there is one."""
    name = instruction_set()
    path = folder / _file_name(name) if name is not None else None
    return path if path is not None and path.exists() else None


def build_all(folder: Path) -> Mapping[str, Path]:
    """Build the library of each instruction set; return them by the sets' names.

    Raises OSError without a compiler, and CalledProcessError when the compilation fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libraries = {name: folder / _file_name(name) for name in INSTRUCTION_SETS}
    for name, path in libraries.items():
        build_kernels(path, name)
    return libraries


def _file_name(name: str) -> str:
    instructions = INSTRUCTION_SETS[name]
    parts = (torch.__version__, *FLAGS, instructions.architecture, *instructions.flags, *sources())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"{name}-{digest[:16]}.so"


if __name__ == "__main__":
    for library in build_all(Path(sys.argv[1])).values():
        print(library)
