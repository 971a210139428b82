"""The page about security names tests that there are, and flags that there are."""

import re
from pathlib import Path

from server.config import GROUPS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 40
    for path, name in named:
        assert re.search(rf"^(async )?def {name or 'test_'}", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_flag_that_the_page_names_exists() -> None:
    flags = {f"--{option.name}" for group in GROUPS for option in group.options}
    assert set(re.findall(r"`(--[\w-]+)`", PAGE)) <= flags
