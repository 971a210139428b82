"""A server with files and batches and three keys, for tests that do not change its limits."""

from collections.abc import Callable, Iterator

import openai
import pytest

from server.text.renderer import Renderer
from tests.server.batches.inputs import batches_in, client
from tests.server.serving import RunningServer, serve, settings

KEYS = ("first-key", "second-key", "third-key")


@pytest.fixture(scope="module")
def keeping(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("batches")
    with (
        batches_in(folder) as batches,
        serve(renderer, settings(api_keys=KEYS), batches=batches) as server,
    ):
        yield server


@pytest.fixture
def client_of(keeping: RunningServer) -> Iterator[Callable[[str], openai.OpenAI]]:
    """Clients by their keys."""
    clients = {key: client(keeping, key) for key in KEYS}
    yield clients.__getitem__
    for each in clients.values():
        each.close()


@pytest.fixture
def sdk(client_of: Callable[[str], openai.OpenAI]) -> openai.OpenAI:
    return client_of(KEYS[0])
