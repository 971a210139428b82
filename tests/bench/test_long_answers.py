"""The figures of long answers."""

import asyncio

import pytest

from bench.long_answers import CONTROL, measure, repeated, sections, table
from server.options.models import DEMO_MODEL


def test_a_token_is_repeated_if_its_ngram_occurred_before() -> None:
    token_ids = [1, 2, 3, 4, 5, 1, 2, 3, 4, 9]
    assert [index for index, flag in enumerate(repeated(token_ids)) if flag] == [8]


def test_sections_are_means_over_answers() -> None:
    assert sections([[0, 0, 1, 1, 2, 2, 3, 3], [2, 2, 3, 3, 4, 4, 5, 5]]) == [1, 2, 3, 4]


@pytest.mark.long
def test_the_whole_cache_diverges_from_itself_by_nothing_and_a_small_ring_does() -> None:
    settings = {
        "full": ("--policy", "full", "--dtype", "float32"),
        CONTROL: ("--policy", "streaming-llm", "--num-sink", "4", "--num-recent", "16", "--dtype", "float32"),
    }
    answers = asyncio.run(measure(str(DEMO_MODEL), settings, 60))
    whole = sections([answer.divergence for answer in answers["full"]])
    control = sections([answer.divergence for answer in answers[CONTROL]])
    assert whole == pytest.approx([0] * 4, abs=1e-3)
    assert control[-1] > 0.01
    assert "| KL, nats | full | 0.000" in table(answers).replace("-0.000", "0.000")
