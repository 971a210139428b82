"""Real server processes of the embedded demo model, each started once for all tests that use it."""

from collections.abc import Callable, Iterator

import pytest
from transformers import AutoTokenizer

from tests.e2e.process import Server, serve
from tests.paths import DEMO_MODEL


@pytest.fixture(scope="session")
def count_tokens() -> Callable[[str], int]:
    """Count a text's tokens as the demo model's tokenizer does."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="session")
def full_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Policy `full`: slots hold every token."""
    with serve("--policy", "full", log=tmp_path_factory.mktemp("full") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def small_slot_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Policy `snapstream` with 8 slots of 1,024 entries."""
    options = ("--policy", "snapstream", "--slot-capacity", "1024", "--num-slots", "8", "--dtype", "float32")
    with serve(*options, log=tmp_path_factory.mktemp("small") / "log") as server:
        yield server
