"""The fake backend: impossible batches are caught, and its made-up model means what the interface says."""

import subprocess
import sys
from dataclasses import replace

import pytest

from backends.clock import VirtualClock
from backends.fake import FakeBackend, fake_spec
from backends.fake_model import choose, expected_tokens, fold
from backends.interface import (
    BackendError,
    Batch,
    DecodeBatch,
    DecodeRow,
    Draw,
    PrefillBatch,
    PrefillRow,
    PrefillShape,
    SamplingParams,
)
from cache.policy import snapstream
from cache.scorer import WindowScorer

SHAPE = PrefillShape(2, 8)
GREEDY = SamplingParams(temperature=0.0)
DRAW = Draw(GREEDY)


def backend() -> FakeBackend:
    """Slots that take 12 tokens directly."""
    policy = snapstream(0, 12, 4, WindowScorer(observation_window=4))
    return FakeBackend(
        fake_spec(num_slots=2, num_scratch=1, max_model_len=24, policy=policy, prefill_shapes=(SHAPE,))
    )


def prefill(*rows: PrefillRow) -> PrefillBatch:
    return PrefillBatch(rows, SHAPE)


def whole(
    slots: tuple[int, ...] = (0,), token_ids: tuple[int, ...] = (5, 6, 7), scratch: int | None = None
) -> PrefillRow:
    return PrefillRow("a", token_ids, 0, len(token_ids), slots, scratch, draws=(DRAW,) * len(slots))


def chunk(
    start: int,
    num_tokens: int,
    num_prompt_tokens: int,
    slots: tuple[int, ...] = (0,),
    scratch: int | None = None,
) -> PrefillRow:
    draws = (DRAW,) * len(slots) if start + num_tokens == num_prompt_tokens else ()
    return PrefillRow("a", (1,) * num_tokens, start, num_prompt_tokens, slots, scratch, draws)


def decode(slot: int = 0, index: int = 3, num_prompt_tokens: int = 3) -> DecodeRow:
    return DecodeRow("a", slot, 9, index, num_prompt_tokens, DRAW)


@pytest.mark.parametrize(
    "batch",
    [
        DecodeBatch((decode(slot=1),)),  # nothing was read there
        DecodeBatch((decode(index=4),)),
        DecodeBatch((decode(num_prompt_tokens=2),)),
        DecodeBatch((decode(), decode())),  # one slot twice
        DecodeBatch((decode(),), num_steps=5),
        prefill(whole((0, 1)), whole((1,))),
        prefill(whole((2,))),
        prefill(whole((1,)), whole((), scratch=0)),  # with and without scratch
        prefill(whole((), scratch=1)),
        prefill(whole(())),
        prefill(whole((), scratch=0), whole((), scratch=0)),
        prefill(whole((0,)), whole((1,)), whole((1,))),
        prefill(chunk(0, 9, 9)),  # more than the shape
        prefill(chunk(0, 8, 17)),  # more than the slot takes directly
        prefill(chunk(8, 8, 16, slots=(1,))),  # its beginning is missing
        prefill(chunk(2, 1, 3)),  # goes on with a prompt that is complete
        prefill(chunk(0, 8, 4)),
        prefill(PrefillRow("a", (1, 2), 0, 2, (0,))),  # nothing is drawn at the prompt's end
        prefill(PrefillRow("a", (1, 2), 0, 3, (0,), draws=(DRAW,))),
        PrefillBatch((whole(),), PrefillShape(1, 64)),
    ],
)
def test_impossible_batches_are_caught(batch: Batch) -> None:
    fake = backend()
    fake.submit(prefill(whole()))
    with pytest.raises(AssertionError):
        fake.submit(batch)


def test_an_incomplete_prompt_cannot_decode() -> None:
    fake = backend()
    fake.submit(prefill(chunk(0, 3, 12)))
    with pytest.raises(AssertionError, match="no complete prompt"):
        fake.submit(DecodeBatch((decode(index=3, num_prompt_tokens=12),)))


def test_a_missing_chunk_is_detected() -> None:
    fake = backend()
    fake.submit(prefill(chunk(0, 4, 12)))
    with pytest.raises(AssertionError):
        fake.submit(prefill(chunk(8, 4, 12)))


def test_a_prompt_packed_from_scratch_continues_in_every_slot() -> None:
    fake = backend()
    prompt = tuple(range(20))
    for start in (0, 8, 16):
        part = prompt[start : start + 8]
        row = PrefillRow("a", part, start, 20, (0, 1), 0, (DRAW, DRAW) if start == 16 else ())
        tokens = fake.submit(prefill(row)).result().tokens[0]
    expected = expected_tokens(prompt, GREEDY, 4, vocab_size=512)
    assert [token.token_id for token in tokens] == [expected[0]] * 2
    rows = tuple(DecodeRow("a", slot, expected[0], 20, 20, Draw(GREEDY, slot, 1)) for slot in (0, 1))
    decoded = fake.submit(DecodeBatch(rows, num_steps=3)).result().tokens
    assert [[token.token_id for token in row] for row in decoded] == [expected[1:]] * 2


def test_steps_take_their_time_and_fail_as_configured() -> None:
    clock = VirtualClock()
    fake = FakeBackend(
        clock=clock, step_time=lambda batch: len(batch.rows) / 4, faults={1: BackendError("planned")}
    )
    batch = PrefillBatch((whole(),), PrefillShape(1, 64))
    assert (fake.submit(batch).result().elapsed, clock.now()) == (0.25, 0.25)
    with pytest.raises(BackendError, match="planned"):
        fake.submit(batch).result()
    assert fake.submit(batch).result().elapsed == 0.25


def ranked(sampling: SamplingParams, banned: tuple[int, ...] = (), output: tuple[int, ...] = ()) -> int:
    """The token after a fixed sequence."""
    return choose(fold(0, (1, 2)), Draw(sampling, 0, 0, banned), 512, (1, 2, *output), 2)


def test_bans_bias_and_penalties_move_the_choice() -> None:
    best = ranked(GREEDY)
    second = (best + 1) % 512
    assert ranked(GREEDY, banned=(best,)) == second
    assert ranked(GREEDY, banned=tuple(range(511))) == 511
    assert ranked(SamplingParams(temperature=0.0, logit_bias=((best, -100.0),))) == second
    assert ranked(SamplingParams(temperature=0.0, logit_bias=((400, 100.0),))) == 400
    for penalised in (
        SamplingParams(temperature=0.0, presence_penalty=1.0),
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
    ):
        assert ranked(penalised, output=(best,)) == second
        assert ranked(penalised, output=(400,)) == best


@pytest.mark.parametrize(
    "narrow",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-6),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-3),
    ],
)
def test_narrow_sampling_is_greedy(narrow: SamplingParams) -> None:
    assert {ranked(replace(narrow, seed=seed)) for seed in range(20)} == {ranked(GREEDY)}


def test_sampling_follows_the_probabilities() -> None:
    """Logits fall by 1/2 from each leader to the next, so each is exp(−1/2) as likely as the one before."""
    best = ranked(GREEDY)
    counts = [0] * 512
    for seed in range(4000):
        counts[(ranked(SamplingParams(temperature=1.0, seed=seed)) - best) % 512] += 1
    assert counts[0] / 4000 == pytest.approx(1 - 0.6065, abs=0.03)
    assert counts[1] / counts[0] == pytest.approx(0.6065, abs=0.06)


def test_no_torch_on_its_path() -> None:
    code = "import sys, backends.fake, scheduler.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
