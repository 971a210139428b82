"""Types of options that several commands have, with the checks of their values.

Files are checked before any work, so that no long measurement ends in a file that cannot be written.
"""

import os
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from backends.options import Shown

SQLITE = "sqlite://"

_PICTURES = (".png", ".svg", ".pdf")


def one_of(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Return the check that a value is one of the names. They are read when there is a value to check."""

    def check(value: str) -> str:
        known = tuple(names())
        if value not in known:
            raise ValueError(f"one of {', '.join(known)}")
        return value

    return AfterValidator(check)


def _path(value: Path) -> Path:
    if value == Path():
        raise ValueError("not empty")
    return value


def _origin(value: str) -> str:
    if re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", value) is None:
        raise ValueError("an origin, as https://example.com, or * for all")
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


def _state_url(value: str) -> str:
    if value.startswith("sqlite:"):
        path = Path(value.removeprefix(SQLITE))
        if not path.is_absolute():
            raise ValueError("a URL like sqlite:///path")
        _writable(path)
        return value
    if find_spec("redis") is None:
        raise ValueError("left out where redis is missing (pip install 'snapserve[redis]')")
    from redis import Redis  # imported late: it is an extra

    try:
        Redis.from_url(value).close()
    except ValueError as error:
        message = "a URL like redis://127.0.0.1:6379/0, with rediss for TLS, unix:///path or sqlite:///path"
        raise ValueError(message) from error
    return value


def is_printable(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _key(value: str) -> str:
    if not is_printable(value) or not value.strip():
        raise ValueError("printable ASCII")
    return value


def _readable(value: Path) -> Path:
    try:
        with value.open():
            return value
    except OSError as error:
        raise ValueError(f"a file that can be read ({error.strerror})") from error


def _writable(value: Path) -> Path:
    if value == Path() or value.is_dir() or not os.access(value if value.exists() else value.parent, os.W_OK):
        raise ValueError("a file that can be written")
    return value


def _writable_or_output(value: str) -> str:
    return value if value == "-" else str(_writable(Path(value)))


def _picture(value: Path) -> Path:
    _need_matplotlib()
    if not str(value).endswith(_PICTURES):
        raise ValueError(f"a file that ends in {', '.join(_PICTURES)}")
    return _writable(value)


def _picture_folder(value: Path) -> Path:
    _need_matplotlib()
    if value.exists() and not value.is_dir():
        raise ValueError("a folder")
    return value


def _need_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise ValueError("left out where matplotlib is missing (pip install 'snapserve[bench]')")


Origin = Annotated[str, AfterValidator(_origin), Shown("ORIGIN")]
Url = Annotated[str, AfterValidator(_url), Shown("URL")]
StateUrl = Annotated[str, AfterValidator(_state_url), Shown("URL", is_secret=True)]
ApiKey = Annotated[str, AfterValidator(_key), Shown("KEY", is_secret=True)]
AnyFile = Annotated[Path, AfterValidator(_path), Shown("FILE")]
InputFile = Annotated[Path, AfterValidator(_readable), Shown("FILE")]
OutputFile = Annotated[Path, AfterValidator(_writable), Shown("FILE")]
JsonFile = Annotated[str, AfterValidator(_writable_or_output), Shown("FILE", flag="json")]
Picture = Annotated[Path, AfterValidator(_picture), Shown("FILE")]
PictureFolder = Annotated[Path, AfterValidator(_picture_folder), Shown("FOLDER")]
