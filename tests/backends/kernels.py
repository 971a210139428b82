"""The native kernels of the tests, built once for all of pytest's processes."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from backends.torch_backend.compiled.build import KERNELS, code_folder
from backends.torch_backend.compiled.trust import make_private, seal
from backends.torch_backend.native.kernels import build_kernels, kernels_are_supported


def kernels_in(cache: Path) -> Path:
    """Return the kernels in a compile cache, where a backend looks for them. They are built if need be."""
    path = code_folder(cache) / KERNELS

    def build() -> None:
        draft = path.with_name(f"{KERNELS}.draft-{os.getpid()}")
        build_kernels(draft)
        seal(draft, path)

    _make_once(path, build)
    return path


def compile_cache_beside(cache: Path, name: str) -> Path:
    """Return a compile cache of its own with the kernels of `cache`, for graphs that no other test needs.

    All of pytest's processes share it too. One that compiles into it does not wait for one that compiles
    into another. Where the processor cannot run kernels, it is empty.
    """
    folder = cache.with_name(f"{cache.name}-{name}")
    if kernels_are_supported():
        built = kernels_in(cache)
        place = code_folder(folder)
        _make_once(place / KERNELS, lambda: copy_kernels(built, place))
    return folder


def copy_kernels(built: Path, folder: Path) -> None:
    """Copy kernels with their checksum, to where a backend looks for them."""
    make_private(folder)
    for path in (built.with_name(f"{built.name}.sha256"), built):
        shutil.copy(path, folder)


def _make_once(path: Path, make: Callable[[], None]) -> None:
    """Make a file that pytest's processes share. A backend's process that builds takes the same lock."""
    make_private(path.parent)
    if not path.exists():
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make()
