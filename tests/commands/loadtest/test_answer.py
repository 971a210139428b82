"""Answers from streams of known bytes with known times of arrival."""

import json

import pytest

from commands.loadtest.answer import Answer, Failure, read_answer
from tests.commands.loadtest.scripted import DONE, event, text, usage


def delta(**fields: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


END = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


def test_latencies_follow_from_times_of_arrival() -> None:
    pieces = [
        (12.0, text("a")),
        (12.5, text("b")),
        (14.0, text("c", "length")),
        (14.0, usage(5, 3)),
        (14.5, DONE),
    ]
    answer = read_answer(10.0, 15.0, pieces)
    assert answer == Answer(10.0, (12.0, 12.5, 14.0), 15.0, 5, 3)
    assert isinstance(answer, Answer)
    assert (answer.ttft, answer.e2el, answer.tpot, answer.itls) == (2.0, 5.0, 1.5, [0.5, 1.5])


def test_a_chunk_of_several_tokens_is_one_gap_and_counts_all_its_tokens() -> None:
    answer = read_answer(0.0, 9.0, [(1.0, text("a")), (5.0, text("bcde", "length")), (9.0, usage(5, 5))])
    assert isinstance(answer, Answer)
    assert (answer.itls, answer.tpot) == ([4.0], 2.0)


def test_chunks_without_text_are_not_the_first_token() -> None:
    pieces = [
        (1.0, delta(role="assistant", content="")),
        (2.0, b": keep-alive\n\n"),
        (3.0, delta(content="x")),
        (4.0, END),
        (4.0, usage(1, 1)),
    ]
    answer = read_answer(0.0, 4.0, pieces)
    assert isinstance(answer, Answer)
    assert (answer.contents, answer.tpot) == ((3.0,), None)


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_each_kind_of_delta_counts_as_content(name: str) -> None:
    answer = read_answer(0.0, 2.0, [(1.0, delta(**{name: "x"})), (2.0, END), (2.0, usage(1, 1))])
    assert isinstance(answer, Answer)
    assert answer.contents == (1.0,)


def test_an_answer_without_any_text_has_no_time_to_first_token() -> None:
    answer = read_answer(0.0, 2.0, [(1.0, text("")), (2.0, text("", "length")), (2.0, usage(4, 2))])
    assert isinstance(answer, Answer)
    assert (answer.ttft, answer.tpot, answer.itls, answer.num_output_tokens) == (None, None, [], 2)


def test_an_event_arrives_with_its_last_byte() -> None:
    stream = (text("a") + text("b", "length") + usage(2, 2) + DONE).replace(b"\n", b"\r\n")
    pieces = [(float(index), stream[index : index + 1]) for index in range(len(stream))]
    answer = read_answer(0.0, 1000.0, pieces)
    assert isinstance(answer, Answer)
    first_end = stream.index(b"\n")
    assert answer.contents == (first_end, stream.index(b"\n", first_end + 3))


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([], "stream ended early"),
        ([text("a"), DONE], "stream ended early"),
        ([text("a"), usage(1, 1), DONE], "stream ended early"),
        ([text("a", "length"), DONE], "no usage in stream"),
        ([text("a", "length"), event({"choices": [], "usage": {"prompt_tokens": 1}})], "no usage in stream"),
        ([text("a"), event({"error": {"message": "out of luck"}}), DONE], "error in stream"),
        ([text("a"), b"data: {oops\n\n", DONE], "malformed stream"),
        ([b"data: [1]\n\n"], "malformed stream"),
    ],
)
def test_an_incomplete_answer_is_a_failure(pieces: list[bytes], reason: str) -> None:
    outcome = read_answer(0.0, 1.0, [(0.5, piece) for piece in pieces])
    assert isinstance(outcome, Failure)
    assert outcome.reason == reason


def test_a_failure_repeats_the_server_error() -> None:
    outcome = read_answer(0.0, 1.0, [(0.5, event({"error": {"message": "out of luck", "code": 500}}))])
    assert isinstance(outcome, Failure)
    assert json.loads(outcome.detail) == {"message": "out of luck", "code": 500}
