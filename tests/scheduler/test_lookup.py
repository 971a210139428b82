"""Guessed tokens change when tokens come, and never which."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.fake import fake_spec, slot_pool
from backends.interface import SamplingParams
from cache.policy import CachePolicy, full, snapstream
from cache.scorer import WindowScorer
from scheduler.config import SchedulerConfig
from scheduler.lookup import Lookup
from scheduler.messages import AdmittedAdd
from tests.scheduler.drive import Drive, answer, request

MODEL_LEN = 96


def drive(policy: CachePolicy | None = None, num_speculative_tokens: int = 7, vocab_size: int = 512) -> Drive:
    pool = slot_pool(4, policy or full(MODEL_LEN), MODEL_LEN, max_draft_tokens=7)
    spec = fake_spec(pools=(pool,), max_model_len=MODEL_LEN, vocab_size=vocab_size)
    return Drive(spec, SchedulerConfig(num_speculative_tokens=num_speculative_tokens))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_tokens_equal_those_of_plain_decoding(data: st.DataObject) -> None:
    """With predictions that are right, wrong, or right in parts, under policies whose rings wrap."""
    policy = data.draw(
        st.sampled_from([full(MODEL_LEN), snapstream(2, 16, 14, WindowScorer(observation_window=4))])
    )
    engine = drive(policy, vocab_size=data.draw(st.sampled_from([4, 512])))
    adds = []
    for index in range(data.draw(st.integers(1, 3))):
        temperature = data.draw(st.sampled_from([0.0, 1.0]))
        add = request(
            f"r{index}",
            max_tokens=data.draw(st.integers(1, 40)),
            prompt_token_ids=tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=50))),
            sampling=SamplingParams(temperature, seed=index),
            stop_token_ids=data.draw(st.frozensets(st.integers(0, 3), max_size=1)),
        )
        tokens = answer(add, engine.spec)
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, 40)] * 2)))
        noise = data.draw(st.lists(st.integers(0, 3), max_size=12))
        prediction = (*tokens[:first], *noise, *tokens[last:])
        adds.append(AdmittedAdd(replace(add, prediction_token_ids=prediction)))
    engine.run(*adds)
    for add in adds:
        assert engine.tokens(add.request_id) == answer(add, engine.spec)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_right_prediction_takes_few_steps(temperature: float) -> None:
    sampling = SamplingParams(temperature, seed=5)
    engine = drive()
    add = request("a", max_tokens=41, sampling=sampling)
    tokens = answer(add, engine.spec)
    engine.run(AdmittedAdd(replace(add, prediction_token_ids=tuple(tokens))))
    assert engine.tokens("a") == tokens
    # Prefill draws the first token, and each of 5 steps 8 more.
    assert len(engine.batches) == 1 + 5
    final = engine.final("a")
    assert (final.num_draft_tokens, final.num_accepted_tokens) == (35, 35)
    assert sum(batch.num_accepted_tokens for batch in engine.batches) == 35
    assert [batch.num_tokens for batch in engine.batches[1:]] == [8] * 5


def test_two_sequences_share_the_rows_and_three_guess_nothing() -> None:
    for num_sequences, expected in ((2, 3), (3, 0)):
        engine = drive()
        adds = [request(f"r{index}", max_tokens=30) for index in range(num_sequences)]
        predicted = [
            AdmittedAdd(replace(add, prediction_token_ids=tuple(answer(add, engine.spec)))) for add in adds
        ]
        engine.send(*predicted)
        while not engine.batches or engine.batches[-1].num_rows < num_sequences:
            engine.step()
        engine.step()
        assert engine.batches[-1].num_draft_tokens == num_sequences * expected
        engine.run()


def test_a_token_of_a_draft_never_overwrites_another() -> None:
    """The ring has 16 entries, of which the prompt takes 8: only the first drafts fit."""
    policy = snapstream(2, 16, 0, WindowScorer(observation_window=4))
    engine = drive(policy)
    add = request("a", num_prompt_tokens=10, max_tokens=40)
    tokens = answer(add, engine.spec)
    engine.run(AdmittedAdd(replace(add, prediction_token_ids=tuple(tokens))))
    assert engine.tokens("a") == tokens
    assert engine.final("a").num_draft_tokens == 7  # the fake backend asserts where tokens are written


@pytest.mark.parametrize(
    "changes",
    [
        {"num_logprobs": 1},
        {"presence_penalty": 0.5},
        {"logit_bias": ((3, 1.0),)},
    ],
)
def test_draws_that_need_more_than_logits_are_not_guessed(changes: dict[str, object]) -> None:
    engine = drive()
    add = request("a", max_tokens=20)
    prediction = tuple(answer(add, engine.spec))
    sampling = replace(add.sampling, **changes)  # type: ignore[arg-type]
    engine.run(AdmittedAdd(replace(add, sampling=sampling, prediction_token_ids=prediction)))
    assert engine.final("a").num_draft_tokens == 0


def test_nothing_is_guessed_when_it_is_switched_off() -> None:
    engine = drive(num_speculative_tokens=0)
    add = request("a", max_tokens=20)
    engine.run(AdmittedAdd(replace(add, prediction_token_ids=tuple(answer(add, engine.spec)))))
    assert engine.final("a").num_draft_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "prediction", "outputs", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [], [1, 2, 3], (4, 5, 6, 7)),  # the prompt's
        ([9], [1, 2, 3, 4, 5], [1], (2, 3, 4, 5)),  # the prediction from its start
        ([9], [7, 1, 2, 3, 4, 5], [1, 2, 3], (4, 5)),  # and from a place within
        ([1, 2, 3, 4], [1, 2, 3, 8], [1, 2, 3], (8,)),  # before the prompt's
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], [], [1, 2, 3], (5, 6, 1, 2)),  # the latest
        ([9, 8, 9, 8], [], [9], (8, 9, 8, 9)),  # a period goes on
        ([1, 2, 3, 4], [5, 6], [7, 8], ()),
        # Four bytes that are no token: the end of one and the beginning of the next.
        ([0x0102, 0x01020000, 0x01020000, 5], [], [0x0102, 0x0102, 0x0102], ()),
    ],
)
def test_a_draft_is_what_followed_the_last_tokens(
    prompt: list[int], prediction: list[int], outputs: list[int], expected: tuple[int, ...]
) -> None:
    assert Lookup(prompt, prediction).draft(outputs, 4) == expected


def test_drafts_that_fail_become_rare() -> None:
    lookup = Lookup([1, 2, 3, 4] * 4, [])
    outputs: list[int] = []
    num_drafts = 0
    for _ in range(400):
        outputs += [1, 2, 3]
        if lookup.draft(outputs, 7):
            num_drafts += 1
            lookup.observe(0)
    assert 20 < num_drafts < 60
    for _ in range(400):
        outputs += [1, 2, 3]
        if lookup.draft(outputs, 7):
            num_drafts += 1
            lookup.observe(7)
    assert num_drafts > 400
