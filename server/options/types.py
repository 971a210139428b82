"""Types of options, with the checks of their values."""

import os
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from backends.options import Shown

SQLITE = "sqlite://"


def one_of(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Return the check that a value is one of the names. They are read when there is a value to check."""

    def check(value: str) -> str:
        known = tuple(names())
        if value not in known:
            raise ValueError(f"one of {', '.join(known)}")
        return value

    return AfterValidator(check)


def _origin(value: str) -> str:
    if re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", value) is None:
        raise ValueError("an origin, as https://example.com, or * for all")
    return value


def _state_url(value: str) -> str:
    if value.startswith("sqlite:"):
        path = Path(value.removeprefix(SQLITE))
        if not path.is_absolute():
            raise ValueError("a URL like sqlite:///path")
        writable(path)
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


def _readable(value: Path) -> Path:
    try:
        with value.open():
            return value
    except OSError as error:
        raise ValueError(f"a file that can be read ({error.strerror})") from error


def writable(value: Path) -> Path:
    """Return the path of a file. Raises ValueError if the file cannot be written."""
    if value == Path() or value.is_dir() or not os.access(value if value.exists() else value.parent, os.W_OK):
        raise ValueError("a file that can be written")
    return value


Origin = Annotated[str, AfterValidator(_origin), Shown("ORIGIN")]
StateUrl = Annotated[str, AfterValidator(_state_url), Shown("URL", is_secret=True)]
InputFile = Annotated[Path, AfterValidator(_readable), Shown("FILE")]
