"""The benchmark of two keys runs against a real server. Its times are not checked."""

from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from bench.two_keys import FLOODS, TwoKeys, table
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.paths import DEMO_MODEL
from tests.server.serving import serve, settings, spec


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(Tokenizer(AutoTokenizer.from_pretrained(DEMO_MODEL)))
    yield renderer
    renderer.close()


def test_both_floods_are_measured(renderer: Renderer) -> None:
    with serve(renderer, settings(api_keys=("greedy", "modest")), spec(max_model_len=32_768)) as server:
        rows = [TwoKeys(server.url, "greedy", "modest").measure(flood, 3, 2) for flood in FLOODS]
        assert {finals.reason.value for finals in server.observed.finals} <= {"stop", "length"}
    assert [row.flood for row in rows] == list(FLOODS)
    assert all(row.alone > 0 and row.beside > 0 and row.num_flood_answers > 0 for row in rows)
    assert len(table(rows).splitlines()) == 2 + len(FLOODS)
