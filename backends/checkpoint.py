"""What the name of a model means: a folder, a hub id, or a GGUF file on disk or on the hub."""

import os
from pathlib import Path
from typing import Final

from backends.errors import ModelLoadError

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "snapserve"
SUFFIX: Final = ".gguf"

_NUM_HUB_PARTS = 3  # owner/name/file.gguf


def model_id(name: str) -> str:
    """Return the name that clients see: the stem of a GGUF file, otherwise the name itself."""
    files = _gguf_files(Path(name)) or [Path(name)]
    return files[0].stem if len(files) == 1 and files[0].suffix == SUFFIX else name


def is_hub_file(name: str) -> bool:
    """Return whether a name has the form owner/name/file.gguf."""
    parts = name.split("/")
    return name.endswith(SUFFIX) and len(parts) >= _NUM_HUB_PARTS and all(parts)


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
