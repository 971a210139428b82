"""Files as the values of options: refused before any work, so that no long measurement ends in a file that cannot be written."""

import os
from importlib.util import find_spec
from pathlib import Path

_PICTURES = (".png", ".svg", ".pdf")


def readable(value: str) -> Path:
    try:
        with Path(value).open():
            return Path(value)
    except OSError as error:
        raise ValueError(f"a file that can be read ({error.strerror})") from error


def writable(value: str) -> Path:
    path = Path(value)
    if not value or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError("a file that can be written")
    return path


def writable_or_output(value: str) -> str:
    """Parse a file's place, or a dash for the standard output."""
    return value if value == "-" else str(writable(value))


def picture(value: str) -> Path:
    need_matplotlib()
    if not value.endswith(_PICTURES):
        raise ValueError(f"a file that ends in {', '.join(_PICTURES)}")
    return writable(value)


def need_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise ValueError("left out where matplotlib is missing (pip install 'snapserve[bench]')")
