"""The native kernels of the tests, built once for all of pytest's processes."""

import fcntl
import os
import shutil
from pathlib import Path

from backends.torch_backend.compiled.build import KERNELS, code_folder
from backends.torch_backend.compiled.trust import make_private, seal
from backends.torch_backend.native.kernels import build_kernels


def kernels_in(cache: Path) -> Path:
    """Return the kernels in a compile cache, where a backend looks for them. They are built if need be."""
    path = code_folder(cache) / KERNELS
    make_private(path.parent)
    if not path.exists():
        with (path.parent / "lock").open("w") as lock:  # a backend's process that builds takes it too
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                draft = path.with_name(f"{KERNELS}.draft-{os.getpid()}")
                build_kernels(draft)
                seal(draft, path)
    return path


def compile_cache_beside(cache: Path, name: str) -> Path:
    """Return a compile cache of its own with the kernels of `cache`, for graphs that no other test needs.

    All of pytest's processes share it too. One that compiles into it does not wait for one that compiles
    into another.
    """
    folder = cache.with_name(f"{cache.name}-{name}")
    built = kernels_in(cache)
    place = code_folder(folder)
    make_private(place)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / KERNELS).exists():
            copy_kernels(built, place)
    return folder


def copy_kernels(built: Path, folder: Path) -> None:
    """Copy kernels with their checksum, to where a backend looks for them."""
    make_private(folder)
    for path in (built, built.with_name(f"{built.name}.sha256")):
        shutil.copy(path, folder)
