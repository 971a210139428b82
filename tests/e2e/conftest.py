"""Real server processes of the demo model and of SmolLM2, each started once for all tests that use it."""

from collections.abc import Callable, Iterator

import pytest
from transformers import AutoTokenizer

from server.options.models import smollm2_file
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


@pytest.fixture(scope="session")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2 with the default slots, as the README starts it."""
    _need_smollm2()
    with serve("--model", "smollm2", log=tmp_path_factory.mktemp("smollm2") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def small_smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2 with the small slots of the README."""
    _need_smollm2()
    options = ("--model", "smollm2", "--slot-capacity", "540")
    with serve(*options, log=tmp_path_factory.mktemp("small-smollm2") / "log") as server:
        yield server


def _need_smollm2() -> None:
    if smollm2_file() is None:
        pytest.skip("SmolLM2 is not installed: scripts/setup-model")
