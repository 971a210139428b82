"""Sequences that follow a grammar of fixed token sequences: draws, ends and refusals."""

from collections.abc import Sequence

import pytest

from backends.fake import fake_spec
from backends.interface import SamplingParams
from scheduler.constraints import Allowed, ConstraintError
from scheduler.messages import FinishReason
from tests.scheduler.drive import Drive, request

SPEC = fake_spec(num_slots=4, max_decode_steps=4)
EOS = 511
WORDS: dict[str, list[tuple[int, ...]]] = {
    "abc": [(10, 20, 30), (10, 20, 40, 50), (60,)],
    "prefix": [(10,), (10, 20)],
    "nothing": [()],
    "one": [(7, 8, 9)],
}


class WordMatcher:
    """Follows one of several words, each a sequence of tokens."""

    def __init__(self, words: list[tuple[int, ...]], fails_after: int) -> None:
        self._words, self._fails_after = words, fails_after

    def allowed(self) -> Allowed:
        mask = bytearray(64)
        for word in self._words:
            if word:
                mask[word[0] // 8] |= 1 << word[0] % 8
        return Allowed(bytes(mask), () in self._words)

    def advance(self, token_id: int) -> None:
        self._fails_after -= 1
        self._words = [word[1:] for word in self._words if word and word[0] == token_id]
        assert self._words, f"token {token_id} was not allowed"
        if self._fails_after == 0:
            raise ConstraintError("too complex")


class Words:
    def __init__(self, fails_after: int = -1) -> None:
        self._fails_after = fails_after

    def matchers(self, grammar: str, number: int) -> Sequence[WordMatcher]:
        if grammar not in WORDS:
            raise ConstraintError(f"no grammar {grammar}")
        return [WordMatcher(WORDS[grammar], self._fails_after) for _ in range(number)]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_choice_is_a_word_of_its_grammar(temperature: float) -> None:
    drive = Drive(SPEC, constraints=Words())
    sampling = SamplingParams(temperature=temperature, seed=3)
    drive.run(
        request("free", 10, 20),
        *(
            request(f"bound{seed}", 10, 20, num_choices=2, sampling=sampling, grammar="abc")
            for seed in range(10)
        ),
    )
    said = [tuple(drive.tokens(f"bound{seed}", choice)) for seed in range(10) for choice in range(2)]
    assert set(said) <= set(WORDS["abc"])
    assert len(set(said)) > 1 or temperature == 0
    assert all(drive.final(f"bound{seed}").reason is FinishReason.STOP for seed in range(10))
    assert drive.final("free").reason is FinishReason.LENGTH


def test_a_launch_has_one_step_while_a_grammar_is_followed() -> None:
    drive = Drive(SPEC, constraints=Words())
    drive.run(request("free", 10, 9), request("bound", 10, 20, grammar="one"))
    steps = [batch.num_steps for batch in drive.batches if batch.kind == "decode"]
    assert steps[:2] == [1, 1]
    assert max(steps) == 4


@pytest.mark.parametrize("seed", range(8))
def test_a_stop_token_is_allowed_only_where_the_text_is_complete(seed: int) -> None:
    drive = Drive(SPEC, constraints=Words())
    sampling = SamplingParams(temperature=2.0, seed=seed)
    drive.run(request("a", 10, 20, sampling=sampling, grammar="prefix", stop_token_ids=frozenset({EOS})))
    final = drive.final("a")
    assert final.reason is FinishReason.STOP
    assert drive.tokens("a") == ([10] if final.stop_token_id == EOS else [10, 20])


def test_without_stop_tokens_a_grammar_runs_to_its_end() -> None:
    drive = Drive(SPEC, constraints=Words())
    drive.run(request("a", 10, 20, grammar="prefix"))
    assert drive.tokens("a") == [10, 20]
    assert (drive.final("a").reason, drive.final("a").stop_token_id) == (FinishReason.STOP, None)


def test_min_tokens_bans_stop_tokens_until_the_grammar_is_complete() -> None:
    drive = Drive(SPEC, constraints=Words())
    stops = frozenset({EOS, 20})
    drive.run(request("a", 10, 20, grammar="prefix", min_tokens=9, stop_token_ids=stops))
    assert drive.tokens("a") == [10]  # then 20, a stop token, is the only token that the grammar allows
    assert drive.final("a").stop_token_id == 20
    drive.run(request("b", 10, 20, grammar="one", min_tokens=9, stop_token_ids=frozenset({EOS})))
    assert drive.tokens("b") == [7, 8, 9]
    assert drive.final("b").reason is FinishReason.STOP


def test_an_answer_may_end_by_its_length_within_a_grammar() -> None:
    drive = Drive(SPEC, constraints=Words())
    drive.run(request("a", 10, 2, grammar="one"))
    assert drive.tokens("a") == [7, 8]
    assert drive.final("a").reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("grammar", "message"), [("unknown", "no grammar unknown"), ("nothing", "the grammar allows no text")]
)
def test_an_unsatisfiable_grammar_is_refused(grammar: str, message: str) -> None:
    drive = Drive(SPEC, constraints=Words())
    drive.run(request("a", grammar=grammar, num_choices=2))
    assert [(drive.final("a", choice).reason, drive.final("a", choice).message) for choice in range(2)] == [
        (FinishReason.REJECTED, message)
    ] * 2


def test_an_engine_without_grammars_refuses_them() -> None:
    drive = Drive(SPEC)
    drive.run(request("a", grammar="one"))
    assert (drive.final("a").reason, drive.final("a").message) == (
        FinishReason.REJECTED,
        "this engine does not support grammars",
    )


@pytest.mark.parametrize("fails_after", [1, 2])
def test_a_grammar_that_becomes_too_complex_ends_its_own_request_only(fails_after: int) -> None:
    drive = Drive(SPEC, constraints=Words(fails_after))
    drive.run(request("free", 10, 9), request("bound", 10, 20, grammar="one"))
    assert (drive.final("bound").reason, drive.final("bound").message) == (
        FinishReason.REJECTED,
        "too complex",
    )
    assert drive.final("free").reason is FinishReason.LENGTH


def test_a_mask_ends_where_its_last_token_does() -> None:
    assert Allowed(b"\x01", may_end=True).token_mask([20], []) == b"\x01\x00\x10"
    assert Allowed(b"\x01", may_end=False).token_mask([20], []) == b"\x01"
    assert Allowed(b"\x03", may_end=False).token_mask([], [0, 99]) == b"\x02"
    assert Allowed(b"\x01", may_end=False).token_mask([], [0]) == b"\x01"
