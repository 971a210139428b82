"""Finds what transformers reads for the name of a model: a folder or hub id itself, or a GGUF file's folder.

A GGUF file is converted once. The converted folder is in the cache, and its name is a digest of the file.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from backends.errors import ModelLoadError

logger = logging.getLogger(__name__)

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "snapserve"
GGUF_CACHE: Final = CACHE / "gguf"
SUFFIX: Final = ".gguf"

_FORMAT_VERSION = 1  # of converted folders; a change of it converts every file again
_HEAD_BYTES = 32 * 2**20  # covers the metadata of every usual file
_NUM_SAMPLES = 64
_ABANDONED_AFTER = 3600  # seconds without a new file
_SAMPLE_BYTES = 2**16
_NUM_HUB_PARTS = 3  # owner/name/file.gguf


def model_id(name: str) -> str:
    """Return the name that clients see: the stem of a GGUF file, otherwise the name itself."""
    files = _gguf_files(Path(name)) or [Path(name)]
    return files[0].stem if len(files) == 1 and files[0].suffix == SUFFIX else name


def is_hub_file(name: str) -> bool:
    """Return whether a name has the form owner/name/file.gguf."""
    parts = name.split("/")
    return name.endswith(SUFFIX) and len(parts) >= _NUM_HUB_PARTS and all(parts)


def local_model(name: str, cache: Path = GGUF_CACHE) -> str:
    """Return the folder or hub id that transformers can load; a GGUF file is converted if it is new.

    `name` is a folder, a hub id, a GGUF file, a folder with one GGUF file, or owner/name/file.gguf on the
    hub. Blocks for seconds or minutes when it downloads or converts. Raises `ModelLoadError`.
    """
    file = gguf_file(name)
    return name if file is None else str(converted(file, cache))


def converted(file: Path, cache: Path = GGUF_CACHE) -> Path:
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


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file of a model's name, or None for a model that is none. Downloads it from the hub.

    Raises `ModelLoadError`.
    """
    path = Path(name)
    files = _gguf_files(path)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelLoadError(f"{name} has {len(files)} GGUF files: {names}. Name one: --model {files[0]}")
    if files:
        return files[0]
    if path.is_file() and path.suffix != SUFFIX:
        raise ModelLoadError(f"{name} must be a folder, a hub id or a file that ends in {SUFFIX}")
    if path.is_file() or not name.endswith(SUFFIX):
        return path if path.is_file() else None
    if not is_hub_file(name) or name.startswith((".", "~")):
        raise ModelLoadError(f"{name}: there is no such file")
    return _downloaded(name)


def _gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder without config.json; none for anything else."""
    return [] if (folder / "config.json").exists() else sorted(folder.glob(f"*{SUFFIX}"))


def _downloaded(name: str) -> Path:
    """Return the local copy of owner/name/file.gguf on the hub. Raises `ModelLoadError`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    owner, repository, file = name.split("/", maxsplit=2)
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", file))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ModelLoadError(f"{name} cannot be downloaded from the hub: {error}") from error


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
