"""Makes a model one that transformers can load: a GGUF file is converted, once, to a folder.

The folder is in the cache, and its name is a digest of the file.
"""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from backends.checkpoint import CACHE, gguf_file
from backends.config import Config, ConfiguredBackend
from backends.errors import ModelLoadError

GGUF_CACHE: Final = CACHE / "gguf"

_FORMAT_VERSION = 1  # of converted folders; a change of it converts every file again
_HEAD_BYTES = 32 * 2**20  # covers the metadata of every usual file
_NUM_SAMPLES = 64
_ABANDONED_AFTER = 3600  # seconds without a new file
_SAMPLE_BYTES = 2**16


def with_local_model(backend: ConfiguredBackend[Config]) -> ConfiguredBackend[Config]:
    """Return a backend whose model transformers can load (`local_model`). Raises `ModelLoadError`."""
    return replace(backend, config=replace(backend.config, model=local_model(backend.config.model)))


def local_model(name: str, cache: Path = GGUF_CACHE) -> str:
    """Return the folder or hub id that transformers can load; a GGUF file is converted if it is new.

    `name` is a folder, a hub id, a GGUF file, a folder with one GGUF file, or owner/name/file.gguf on the
    hub. Blocks for seconds or minutes when it downloads or converts. Raises `ModelLoadError`.
    """
    file = gguf_file(name)
    return name if file is None else str(_converted(file, cache))


def _converted(file: Path, cache: Path) -> Path:
    """Return the folder of a converted GGUF file. Raises `ModelLoadError`.

    Servers that convert the same file at the same time all succeed: the first one's folder is kept.
    """
    try:
        folder = cache / _digest(file)
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    if not folder.is_dir():
        # Not at the top: this imports torch and transformers.
        from backends.torch_backend.model.gguf_file import convert

        _write_folder(folder, lambda target: convert(file, target))
    return folder


def _digest(file: Path) -> str:
    """Return a digest of a file's size, its metadata and samples of its weights.

    Reading all of a large file would take longer than reading its converted weights. Samples differ between
    fine-tuned versions of one model, because training changes every tensor.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(f"{_FORMAT_VERSION} {size} ".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_HEAD_BYTES))
        for index in range(_NUM_SAMPLES):
            stream.seek(max(size - _SAMPLE_BYTES, 0) * index // (_NUM_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Create a folder with what `write` puts into it. Readers see all of it or nothing.

    Raises `ModelLoadError`.
    """
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for abandoned in folder.parent.glob("partial-*"):  # by a conversion that was killed
            with suppress(OSError):  # another server was faster
                if time.time() - abandoned.stat().st_mtime > _ABANDONED_AFTER:
                    shutil.rmtree(abandoned)
        temporary = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
        write(temporary)
        temporary.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # otherwise another server was faster
            raise ModelLoadError(
                f"the converted model cannot be written to {folder.parent}: {error.strerror or error}. "
                "XDG_CACHE_HOME sets another place."
            ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
