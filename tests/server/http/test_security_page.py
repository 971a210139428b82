"""The page about security names tests that there are, and flags that there are."""

import re
from pathlib import Path

from server.options.command_line import options_of
from server.options.serve import serve_groups

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (
            f"{path}::{name}"
        )


def test_every_limit_and_advisory_has_a_test() -> None:
    tables = [table.splitlines() for table in PAGE.split("\n\n") if re.match(r"\|.*\| test \|\n", table)]
    assert [len(table) > 15 for table in tables] == [True, True]
    for row in (row for _, _, *rows in tables for row in rows):
        assert re.search(r"\| `tests/[^|]+` \|$", row), row


def test_every_flag_that_the_page_names_exists() -> None:
    flags = {f"--{option.name}" for group in serve_groups() for option in options_of(group)}
    assert set(re.findall(r"`(--[\w-]+)`", PAGE)) <= flags
