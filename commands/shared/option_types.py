"""Types of options that several commands have, with the checks of their values.

Files are checked before any work, so that no long measurement ends in a file that cannot be written.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from backends.options import Shown
from server.options.types import writable

_PICTURES = (".png", ".svg", ".pdf")


def _path(value: Path) -> Path:
    if value == Path():
        raise ValueError("not empty")
    return value


def _url(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError("a URL like http://127.0.0.1:8000")
    return value.rstrip("/")


def is_printable(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _key(value: str) -> str:
    if not is_printable(value) or not value.strip():
        raise ValueError("printable ASCII")
    return value


def _writable_or_output(value: str) -> str:
    return value if value == "-" else str(writable(Path(value)))


def _picture(value: Path) -> Path:
    _need_matplotlib()
    if not str(value).endswith(_PICTURES):
        raise ValueError(f"a file that ends in {', '.join(_PICTURES)}")
    return writable(value)


def _picture_folder(value: Path) -> Path:
    _need_matplotlib()
    if value.exists() and not value.is_dir():
        raise ValueError("a folder")
    return value


def _need_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise ValueError("left out where matplotlib is missing (pip install 'snapserve[bench]')")


Url = Annotated[str, AfterValidator(_url), Shown("URL")]
ApiKey = Annotated[str, AfterValidator(_key), Shown("KEY", is_secret=True)]
AnyFile = Annotated[Path, AfterValidator(_path), Shown("FILE")]
OutputFile = Annotated[Path, AfterValidator(writable), Shown("FILE")]
JsonFile = Annotated[str, AfterValidator(_writable_or_output), Shown("FILE", flag="json")]
Picture = Annotated[Path, AfterValidator(_picture), Shown("FILE")]
PictureFolder = Annotated[Path, AfterValidator(_picture_folder), Shown("FOLDER")]
