"""The benchmark of two keys runs against a real server. Its times are not checked."""

from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from bench.systems.system import MeasurementError
from bench.two_keys import FLOODS, Row, TwoKeys, table
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
        rows = [TwoKeys(server.url, "greedy", "modest").measure(flood, 2, 3, 2) for flood in FLOODS]
        assert {finals.reason.value for finals in server.observed.finals} <= {"stop", "length"}
    assert [row.flood for row in rows] == list(FLOODS)
    assert all(len(row.alone) == len(row.beside) == 2 and min(row.ratios) > 0 for row in rows)
    assert all(row.num_flood_answers >= 4 for row in rows), "each of two clients in each of two rounds"


def test_the_ratio_is_the_median_of_rounds() -> None:
    row = Row("tokenizing", (0.1, 0.2, 0.4), (0.2, 0.2, 0.6), 7)
    assert row.ratio == pytest.approx(1.5)
    assert table([row]).splitlines()[2] == "| tokenizing | 0.200 | 0.200 | 1.50 | 1.00, 2.00 |"


def test_a_flood_that_cannot_begin_is_an_error() -> None:
    keys = TwoKeys("http://127.0.0.1:9", "greedy", "modest")
    with pytest.raises(MeasurementError, match="before its first answer"), keys.flooded("tokenizing", 1):
        pass
