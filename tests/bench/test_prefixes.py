"""The client of the prefix benchmark, against a real server that stores prompts."""

from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from backends.interface import PrefixSpec
from bench.prefixes import Client, Row, Sizes, table
from bench.systems.servers import Server
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.paths import DEMO_MODEL
from tests.server.serving import VOCAB_SIZE, serve, spec

SIZES = Sizes().scaled(0.01, VOCAB_SIZE)


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(Tokenizer(AutoTokenizer.from_pretrained(DEMO_MODEL)))
    yield renderer
    renderer.close()


@pytest.fixture
def client(renderer: Renderer) -> Iterator[Client]:
    with (
        serve(renderer, backend_spec=spec(prefixes=PrefixSpec(512, 8, 64))) as running,
        Client(Server("ours", (), "/ready"), running.url, 1, VOCAB_SIZE) as client,
    ):
        yield client


def test_restored_tokens_and_generated_ids_are_read(client: Client) -> None:
    prompt = client.new_ids(50)
    first = client.ask(prompt, 6)
    assert (first.num_cached, len(first.token_ids)) == (0, 6)
    assert client.ask(prompt, 6).num_cached == 48
    assert client.ask([*prompt, *first.token_ids, 400]).num_cached >= 48


def test_each_load_has_times(client: Client) -> None:
    assert min(*client.hit_over_cold(SIZES), client.chat(SIZES), *client.questions(SIZES)) > 0


def test_the_table_has_ratios() -> None:
    assert table([Row("a", "b", 1.0, 4.0)]).endswith("| a | b | 1 | 4 | **0.250** |")
