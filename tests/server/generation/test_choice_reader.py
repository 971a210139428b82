"""How many tokens of an answer are reasoning: the same however the answer is cut into deltas."""

import asyncio
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.messages import Final, FinishReason, Timing
from server.generation.choice_reader import ChoiceReader
from server.generation.events import ChoiceDelta
from server.parsers.answer_reader import AnswerReader
from server.parsers.parts import Reasoning
from server.parsers.reasoning import REASONING_FORMATS, ReasoningParser
from server.text.logprobs import TokenLogprob
from server.text.renderer import Renderer

END = Final(FinishReason.STOP, Timing(0, None, None, 0), 1, 1)
PARTS = ["Anna keeps", "<think>", "</think>", " the lamp", "\n", "zé", ""]


def count(renderer: Renderer, tokens: list[int], cuts: list[int], *, is_open: bool) -> tuple[int, str]:
    """Return how many of these tokens are reasoning, and its text, read in deltas that end at `cuts`."""
    parser = ReasoningParser(REASONING_FORMATS["think"], is_open=is_open)
    reader, pieces = ChoiceReader(AnswerReader(parser, None), renderer.vocabulary), []
    borders = [0, *sorted(cuts), len(tokens)]
    for start, end in itertools.pairwise(borders):
        part = tuple(tokens[start:end])
        pieces += reader.read(ChoiceDelta(0, "".join(map(renderer.token_text, part)), part))
    pieces += reader.read(ChoiceDelta(0, final=END))
    return reader.num_reasoning_tokens, "".join(
        piece.text for piece in pieces if isinstance(piece, Reasoning)
    )


def encoded(renderer: Renderer, text: str) -> list[int]:
    return list(asyncio.run(renderer.encode(text, add_special_tokens=False))) if text else []


@given(parts=st.lists(st.sampled_from(PARTS), max_size=8), is_open=st.booleans(), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_cuts_make_no_difference(
    renderer: Renderer, parts: list[str], is_open: bool, data: st.DataObject
) -> None:
    tokens = encoded(renderer, "".join(parts))
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))
    assert count(renderer, tokens, cuts, is_open=is_open) == count(
        renderer, tokens, list(range(len(tokens))), is_open=is_open
    )


@pytest.mark.parametrize("is_open", [False, True])
def test_the_tags_count(renderer: Renderer, is_open: bool) -> None:
    thought = encoded(renderer, ("" if is_open else "<think>") + "Anna keeps the lamp</think>")
    answer = encoded(renderer, " Anna keeps")
    assert count(renderer, thought + answer, [], is_open=is_open)[0] == len(thought)
    assert count(renderer, thought, [], is_open=is_open)[0] == len(thought)
    assert count(renderer, answer, [], is_open=is_open)[0] == (len(answer) if is_open else 0)


def test_content_keeps_its_log_probabilities(renderer: Renderer) -> None:
    thought, answer = encoded(renderer, "<think>Anna keeps</think>"), encoded(renderer, " the lamp")
    parser = ReasoningParser(REASONING_FORMATS["think"], is_open=False)
    reader, found = ChoiceReader(AnswerReader(parser, None), renderer.vocabulary), []
    for part in (thought + answer[:1], *([token] for token in answer[1:])):
        text = "".join(map(renderer.token_text, part))
        logprobs = tuple(TokenLogprob(renderer.token_text(token), token, b"", -1.0) for token in part)
        reader.read(ChoiceDelta(0, text, tuple(part), logprobs))
        found += [logprob.token_id for logprob in reader.content_logprobs]
    assert found == answer
