"""The files that commands write their results to: JSON documents and plots."""

import json
import sys
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from server.options.command_line import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 80
_NUM_COLOURS = 128


def write_json(document: Mapping[str, object], path: str, *, indent: int) -> None:
    """Write a document to the file of `--json`; "-" is the standard output.

    Raises `OptionError` for a file that cannot be written.
    """
    text = json.dumps(document, indent=indent) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise OptionError(f"--json {path} cannot be written: {error}") from error


def save_plot(figure: "Figure", path: Path) -> None:
    """Write a figure to the file of `--plot`. Raises `OptionError` for a file that cannot be written."""
    try:
        if path.suffix == ".png":
            _save_small_png(figure, path)
        else:
            figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"--plot {path} cannot be written: {error}") from error


def _save_small_png(figure: "Figure", path: Path) -> None:
    """Write a figure with a palette: a quarter of the bytes of full colour, and lines look the same."""
    from PIL import Image

    full_colour = BytesIO()
    figure.savefig(full_colour, format="png", dpi=_DPI)
    Image.open(full_colour).convert("RGB").quantize(_NUM_COLOURS).save(path, optimize=True)
