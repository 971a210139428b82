"""Generations over a real engine: text, stop strings, what counts, and what fails."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from backends.fake import fake_spec
from backends.fake_model import expected_tokens
from backends.interface import BackendError, SamplingParams
from scheduler.admission import admit
from scheduler.messages import Add, FinishReason
from server.engine.async_engine import AsyncEngine
from server.generation.decoder import Decoder, TextOptions
from server.generation.event_queue import EventQueue
from server.generation.events import ChoiceDelta, Event, GenerationError, Progress, PromptLogprobs
from server.text.logprobs import TokenLogprob
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.server.engines import GREEDY, Gate, Observations, add_of, is_at_rest, running
from tests.server.text.tokenizers import byte_level, id_of, metaspace, text_of

TOKENIZER = byte_level()
VOCAB_SIZE = len(TOKENIZER)
SPEC = fake_spec(vocab_size=VOCAB_SIZE)
PROMPT = tuple(TOKENIZER.encode("hello world", add_special_tokens=False))


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(Tokenizer(TOKENIZER))
    yield renderer
    renderer.close()


@dataclass
class Answer:
    """One choice, put together from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: ChoiceDelta | None = None

    def add(self, delta: ChoiceDelta) -> None:
        assert self.last is None, "a delta after the last"
        assert delta.text or delta.token_ids or delta.final
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.last = delta if delta.final is not None else None

    @property
    def end(self) -> tuple[str | None, str | int | None, int]:
        assert self.last is not None
        assert self.last.final is not None
        return self.last.finish_reason, self.last.stop_reason, self.last.final.num_output_tokens


async def events_of(engine: AsyncEngine, renderer: Renderer, add: Add, **options: Any) -> list[Event]:
    """Return a request's events, but for its acceptance."""
    text_options = TextOptions(**options)
    events: list[Event] = []
    with engine.reserve(add.num_choices) as ticket:
        queue = EventQueue(
            engine,
            [admit(add, engine.spec)],
            lambda add: Decoder(add, renderer, text_options, engine.finish),
            ticket,
            max_lag=60,
        )
        with queue:
            await queue.accepted()
            while (item := await queue.next()) is not None:
                events.append(item[1])
    return events


async def answers_of(
    engine: AsyncEngine, renderer: Renderer, add: Add, *stop: str, **options: Any
) -> list[Answer]:
    events = await events_of(engine, renderer, add, stop=stop, **options)
    answers = [Answer() for _ in range(add.num_choices)]
    for event in events:
        if isinstance(event, ChoiceDelta):
            answers[event.choice].add(event)
    return answers


def expected_ids(add: Add, choice: int = 0) -> list[int]:
    return expected_tokens(PROMPT, add.sampling, add.stop.max_tokens, vocab_size=VOCAB_SIZE, choice=choice)


@pytest.mark.parametrize("max_decode_steps", [1, 4])
async def test_text_is_the_tokens_text(renderer: Renderer, max_decode_steps: int) -> None:
    async with running(Observations(), spec=SPEC, max_decode_steps=max_decode_steps) as engine:
        add = add_of(PROMPT, 60)
        (answer,) = await answers_of(engine, renderer, add)
    assert answer.token_ids == expected_ids(add)
    assert answer.text == text_of(TOKENIZER, expected_ids(add), skip_special_tokens=True)
    assert answer.end == ("length", None, 60)


async def test_choices_do_not_mix(renderer: Renderer) -> None:
    async with running(Observations(), spec=SPEC) as engine:
        add = add_of(PROMPT, 20, num_choices=9, sampling=SamplingParams(seed=3))
        answers = await answers_of(engine, renderer, add)
    for choice, answer in enumerate(answers):
        assert answer.text == text_of(TOKENIZER, expected_ids(add, choice), skip_special_tokens=True)


@pytest.mark.parametrize("max_decode_steps", [1, 4])
@pytest.mark.parametrize("include", [True, False])
async def test_stop_strings_wherever_they_lie(max_decode_steps: int, include: bool) -> None:
    tokenizer = metaspace()  # whose tokens are whole characters, so that any of its texts can be cut anywhere
    renderer, vocab_size, seen = Renderer(Tokenizer(tokenizer)), len(tokenizer), Observations()
    ids = expected_tokens((5, 6), GREEDY, 24, vocab_size=vocab_size)
    texts = [text_of(tokenizer, ids[:n], skip_special_tokens=True) for n in range(25)]
    async with running(
        seen, spec=fake_spec(vocab_size=vocab_size), max_decode_steps=max_decode_steps
    ) as engine:
        for start in range(len(texts[-1]) - 2):
            stop = texts[-1][start : start + 3]
            (answer,) = await answers_of(
                engine, renderer, add_of((5, 6), 24), stop, "not there", include_stop_string=include
            )
            end = texts[-1].index(stop) + 3
            num_tokens = next(n for n, text in enumerate(texts) if len(text) >= end)
            assert answer.text == texts[-1][: end if include else end - 3]
            assert answer.end == ("stop", stop, num_tokens)
            assert answer.token_ids == ids[:num_tokens]
    assert (sum(final.num_discarded_tokens for final in seen.finals.values()) > 0) or max_decode_steps == 1
    assert seen.num_generated == sum(final.num_output_tokens for final in seen.finals.values())
    renderer.close()


async def test_stop_tokens_count_but_are_no_text(renderer: Renderer) -> None:
    add = add_of(PROMPT, 24, sampling=replace(GREEDY, num_logprobs=0))
    ids = expected_ids(add)
    stop_id = ids[7]
    before = ids[: ids.index(stop_id)]
    add = replace(add, stop=replace(add.stop, stop_token_ids=frozenset([stop_id])))
    async with running(Observations(), spec=SPEC) as engine:
        (answer,) = await answers_of(engine, renderer, add)
        (included,) = await answers_of(
            engine, renderer, replace(add, request_id="again"), include_stop_string=True
        )
    assert answer.end == ("stop", stop_id, len(before) + 1)
    assert answer.token_ids == [*before, stop_id]
    assert [entry.token_id for entry in answer.logprobs] == before
    assert answer.text == text_of(TOKENIZER, before, skip_special_tokens=True)
    assert included.text == text_of(TOKENIZER, [*before, stop_id], skip_special_tokens=True)


async def test_an_end_token_of_the_model_has_no_stop_reason(renderer: Renderer) -> None:
    end = id_of(TOKENIZER, "<|end|>")
    add = add_of(
        PROMPT, 50, sampling=replace(GREEDY, logit_bias=((end, 100.0),)), stop_token_ids=frozenset([end])
    )
    async with running(Observations(), spec=SPEC) as engine:
        (answer,) = await answers_of(engine, renderer, add)
    assert (answer.text, answer.end) == ("", ("stop", None, 1))


async def test_stop_strings_wait_for_min_tokens(renderer: Renderer) -> None:
    add = add_of(PROMPT, 24, min_tokens=24)
    text = text_of(TOKENIZER, expected_ids(add), skip_special_tokens=True)
    async with running(Observations(), spec=SPEC) as engine:
        (answer,) = await answers_of(engine, renderer, add, text[:2])
    assert answer.end == ("length", None, 24)
    assert answer.text == text


async def test_logprobs_are_returned_with_their_text(renderer: Renderer) -> None:
    add = add_of(PROMPT, 30, sampling=replace(GREEDY, num_logprobs=2), num_prompt_logprobs=1)
    async with running(Observations(), spec=SPEC, max_decode_steps=4) as engine:
        events = await events_of(engine, renderer, add, stop=("zzz",))
    deltas = [event for event in events if isinstance(event, ChoiceDelta)]
    for delta in deltas:
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == expected_ids(add)
    assert b"".join(
        entry.bytes for entry in entries if entry.token_id not in renderer.vocabulary.special_token_ids
    ).decode(errors="replace") == "".join(delta.text for delta in deltas)
    assert all(len(entry.top) == 2 and entry.logprob is not None for entry in entries)
    (prompt,) = [event for event in events if isinstance(event, PromptLogprobs)]
    assert [entry.token_id for entry in prompt.tokens] == list(PROMPT)
    assert [entry.logprob is None for entry in prompt.tokens] == [True] + [False] * (len(PROMPT) - 1)
    assert "".join(entry.token for entry in prompt.tokens) == "hello world"


async def test_a_prompt_that_is_only_scored(renderer: Renderer) -> None:
    add = add_of(PROMPT, 0, num_prompt_logprobs=0)
    async with running(Observations(), spec=SPEC) as engine:
        events = await events_of(engine, renderer, add)
    assert [type(event) for event in events] == [Progress, PromptLogprobs, ChoiceDelta]
    assert isinstance(events[-1], ChoiceDelta)
    assert (events[-1].finish_reason, events[-1].text) == ("length", "")


async def test_reading_a_long_prompt_shows_progress(renderer: Renderer) -> None:
    async with running(Observations(), spec=SPEC) as engine:
        events = await events_of(engine, renderer, add_of(PROMPT * 100, 2))
    progress = [event.num_computed_prompt_tokens for event in events if isinstance(event, Progress)]
    assert len(progress) > 1
    assert progress == sorted(set(progress))
    assert progress[-1] == len(PROMPT) * 100


async def test_an_end_by_error_is_raised(renderer: Renderer) -> None:
    async with running(
        Observations(), spec=SPEC, faults=dict.fromkeys(range(1, 4), BackendError("lost"))
    ) as engine:
        with pytest.raises(GenerationError) as raised:
            await events_of(engine, renderer, add_of(PROMPT, 10, num_choices=2))
    assert raised.value.final.reason is FinishReason.ERROR


async def test_cancelling_a_reader_aborts_the_request(renderer: Renderer) -> None:
    seen, gate = Observations(), Gate(is_open=False)
    async with running(seen, spec=SPEC, gate=gate) as engine:
        reading = asyncio.create_task(events_of(engine, renderer, add_of(PROMPT, 1000)))
        await gate.wait_for_step()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        gate.let(2)
        await seen.wait_until(is_at_rest)
    assert [final.reason for final in seen.finals.values()] == [FinishReason.ABORT]


async def test_concurrent_generations_equal_single_ones(renderer: Renderer) -> None:
    adds = [add_of(PROMPT[: 1 + i % 5], 20 + i) for i in range(24)]
    async with running(Observations(), spec=SPEC, max_decode_steps=4) as engine:
        answers = await asyncio.gather(*(answers_of(engine, renderer, add) for add in adds))
    for add, (answer,) in zip(adds, answers, strict=True):
        ids = expected_tokens(add.prompt_token_ids, GREEDY, add.stop.max_tokens, vocab_size=VOCAB_SIZE)
        assert answer.text == text_of(TOKENIZER, ids, skip_special_tokens=True)
