"""The tables of options in the documents are those that the code makes."""

from pathlib import Path

import pytest

from commands.reference import TABLES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("file", TABLES)
def test_the_documented_options_are_current(file: str) -> None:
    assert TABLES[file]() in (REFERENCE / file).read_text(), (
        f"put what `python -m commands.reference {file}` prints into the file"
    )
