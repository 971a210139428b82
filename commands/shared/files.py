"""The files that commands write their results to: JSON documents and plots."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from server.options.command_line import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"--plot {path} cannot be written: {error}") from error
