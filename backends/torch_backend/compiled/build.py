"""The process that builds the code of compiled decode.

`python -m backends.torch_backend.compiled.build FOLDER KEY…` builds the graphs with these keys, whose text is
in the folder, and the kernels if none came with the package, unless they were built before. It locks the
folder while it works.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from backends.torch_backend.compiled.trace import GraphSource, compile_graph
from backends.torch_backend.compiled.trust import seal
from backends.torch_backend.native.kernels import (
    FLAGS,
    INSTRUCTION_SETS,
    build_kernels,
    instruction_set,
    load_kernels,
    sources,
)
from backends.torch_backend.native.packaged import packaged_kernels
from backends.torch_backend.torch_private.graph_code import OPTIONS

KERNELS = "kernels.so"
_FORMAT = "2"  # of the folder; a change of it compiles everything again


def code_folder(cache: Path) -> Path:
    """Return the folder for the code of this processor, this torch, these kernels and these options."""
    cpu_info = Path("/proc/cpuinfo")
    flags = ""
    if cpu_info.exists():
        flags = next((line for line in cpu_info.read_text().splitlines() if line.startswith("flags")), "")
    instructions = INSTRUCTION_SETS.get(instruction_set() or "")
    parts = (_FORMAT, torch.__version__, sys.version, flags, repr((OPTIONS, FLAGS, instructions)), *sources())
    return cache / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def build_folder(folder: Path) -> Path:
    """Return inductor's folder while graphs are compiled. `TORCHINDUCTOR_CACHE_DIR` must name it."""
    return folder / "build"


def unpacked_folder(folder: Path) -> Path:
    """Return inductor's folder while graphs are loaded: their files are unpacked into it."""
    return folder / "inductor"


def graph_path(folder: Path, key: str) -> Path:
    """Return the file of a compiled graph."""
    return folder / f"{key}.graph"


def source_path(folder: Path, key: str) -> Path:
    """Return the file of a graph's text."""
    return folder / f"{key}.json"


def main(folder: Path, keys: Sequence[str]) -> None:
    """Build what the folder lacks, while other processes wait for its lock."""
    os.umask(0o077)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Of a process that was killed: inductor would take its unfinished files for finished ones.
        shutil.rmtree(build_folder(folder), ignore_errors=True)
        for partial in folder.glob(f"{Path(KERNELS).stem}.[0-9]*"):
            partial.unlink()
        kernels = packaged_kernels() or folder / KERNELS
        if not kernels.exists():
            draft = folder / "kernels.partial"
            build_kernels(draft)
            seal(draft, kernels)
        load_kernels(kernels)
        for key in keys:
            target = graph_path(folder, key)
            if not target.exists():
                draft = folder / "graph.partial"
                draft.unlink(missing_ok=True)
                compile_graph(GraphSource.from_json(source_path(folder, key).read_text()), draft)
                _copy_libraries(build_folder(folder), unpacked_folder(folder))
                seal(draft, target)


def _copy_libraries(built: Path, unpacked: Path) -> None:
    """Copy what was compiled to where `load_compiled` looks for it.

    A graph's file has the C++ code of its kernels, but not their libraries. Inductor would compile them again
    when the graph is loaded, in the thread that runs the steps.
    """
    for library in built.rglob("*.so"):
        target = unpacked / library.relative_to(built)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_suffix(".partial")
            shutil.copy(library, draft)
            seal(draft, target)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stderr}")
