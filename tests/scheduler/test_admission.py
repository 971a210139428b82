"""What can never be served is refused, with the numbers; what just fits is not."""

from dataclasses import replace

import pytest

from backends.fake import fake_spec, slot_pool
from backends.interface import BackendSpec, Feature, SamplingParams, ScratchSpec
from cache.policy import full, snapkv, snapstream
from cache.scorer import WindowScorer
from cache.scratch import ScratchLayout
from scheduler.admission import RefusalReason, RefusedError, admit, exact_output_tokens, needs_scratch, route
from scheduler.messages import Add
from tests.scheduler.drive import request


def refusal(add: Add, spec: BackendSpec) -> str | None:
    """Return why a request is refused; None for one that is admitted, and then unchanged."""
    try:
        assert admit(add, spec) is add
    except RefusedError as error:
        return str(error)
    return None


SCORER = WindowScorer(observation_window=8)
SPEC = fake_spec(policy=snapstream(4, 32, 28, SCORER), max_model_len=1024)
DIRECT = 4 + 32  # tokens that a slot holds in their order


@pytest.mark.parametrize(
    ("add", "parts"),
    [
        (request("a", 1000, 25), ("1000 tokens", "up to 25", "1025 in all", "at most 1024")),
        (request("a", 1025, 0), ("1025 tokens", "at most 1024")),
        (request("a", 0), ("no tokens",)),
        (request("a", 1020, 5, num_prefill_tokens=10), ("1020 tokens", "1025 in all", "at most 1024")),
        (
            request("a", 10, num_prefill_tokens=0),
            ("num_prefill_tokens", "from 1 to the prompt's 10 tokens", "got 0"),
        ),
        (request("a", 10, num_prefill_tokens=11), ("num_prefill_tokens", "10 tokens", "got 11")),
        (Add("a", (3, 512), SamplingParams(), request("b").stop, 0.0), ("token id 512", "512 tokens")),
        (request("a", stop_token_ids=frozenset({999})), ("token id 999",)),
        (request("a", sampling=SamplingParams(logit_bias=((-1, 2.0),))), ("token id -1",)),
    ],
)
def test_refuses_with_the_numbers(add: Add, parts: tuple[str, ...]) -> None:
    message = refusal(add, SPEC)
    assert message is not None
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "add", [request("a", 1000, 24), request("a", 1024, 0), request("a", 1, 1), request("a", 1, 1023)]
)
def test_accepts_an_exact_fit(add: Add) -> None:
    assert refusal(add, SPEC) is None


def test_refuses_what_the_policy_cannot_hold() -> None:
    spec = fake_spec(policy=snapkv(16, 20, SCORER), max_model_len=1024)
    assert refusal(request("a", 100, 16), spec) is None
    message = "up to 17 tokens are requested, but policy snapkv admits at most 16 after 100 prompt tokens"
    assert refusal(request("a", 100, 17), spec) == message
    assert refusal(request("a", 100, 9, num_prefill_tokens=93), spec) is None
    assert refusal(request("a", 100, 10, num_prefill_tokens=93), spec) == message.replace("17", "10").replace(
        "16", "9"
    )


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "needs"), [(DIRECT, 1, False), (DIRECT + 1, 1, True), (1, 0, True)]
)
def test_scratch_is_for_long_prompts_and_for_those_without_a_slot(
    num_prompt_tokens: int, max_tokens: int, needs: bool
) -> None:
    add = request("a", num_prompt_tokens, max_tokens)
    assert needs_scratch(add, SPEC) is needs
    assert (refusal(add, replace(SPEC, scratch=ScratchSpec(0, ScratchLayout(1024)))) is not None) is needs
    assert refusal(add, replace(SPEC, scratch=ScratchSpec(1, ScratchLayout(1024)))) is None


@pytest.mark.parametrize(
    ("num_prefill_tokens", "max_tokens", "needs"),
    [(DIRECT, 1, False), (DIRECT + 1, 1, True), (DIRECT, 0, False), (100, 0, True)],
)
def test_tokens_read_by_decode_need_a_slot_and_no_scratch(
    num_prefill_tokens: int, max_tokens: int, needs: bool
) -> None:
    add = request("a", 100, max_tokens, num_prefill_tokens=num_prefill_tokens)
    assert needs_scratch(add, SPEC) is needs
    assert add.needs_slot is (num_prefill_tokens < 100 or max_tokens > 0)


def test_refuses_a_prompt_longer_than_the_scratch() -> None:
    spec = replace(SPEC, scratch=ScratchSpec(1, ScratchLayout(80)))
    assert refusal(request("a", 80), spec) is None
    assert refusal(request("a", 81), spec) == "the prompt has 81 tokens, but a scratch holds at most 80"


@pytest.mark.parametrize("missing", list(Feature))
def test_refuses_an_undeclared_feature_by_name(missing: Feature) -> None:
    sampling = SamplingParams(temperature=1.0, presence_penalty=1.0, logit_bias=((1, 1.0),), num_logprobs=2)
    add = request(
        "a",
        sampling=sampling,
        min_tokens=1,
        stop_token_ids=frozenset({3}),
        num_prompt_logprobs=0,
        grammar="g",
    )
    add = replace(add, num_prefill_tokens=5, returns_kept=True)
    assert refusal(add, SPEC) is None
    assert (
        refusal(add, replace(SPEC, features=frozenset(Feature) - {missing}))
        == f"the backend does not support {missing.value}"
    )
    assert refusal(request("a"), replace(SPEC, features=frozenset())) is None


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_forced_tokens", "max_tokens", "pool"),
    [
        (
            30,
            0,
            7,
            0,
        ),  # 4 sinks and a ring of 32: with the last token drawn, which is not written, nothing is lost
        (30, 0, 8, 1),
        (64, 0, 1, 0),
        (64, 0, 2, 1),
        (200, 0, 56, 1),
        (200, 0, 57, 0),
        (1000, 0, 1, 0),
        (1000, 0, 25, 0),  # no pool admits it: the refusal is the first pool's, which has the most room
        (30, 6, 1, 0),
        (64, 10, 1, 1),  # the slot is filled before its end
    ],
)
def test_routes_to_the_first_exact_pool_else_to_the_first_that_admits(
    num_prompt_tokens: int, num_forced_tokens: int, max_tokens: int, pool: int
) -> None:
    spec = fake_spec(
        pools=(slot_pool(4, snapstream(4, 32, 28, SCORER), 1024), slot_pool(1, full(256), 1024)),
        max_model_len=1024,
    )
    assert route(num_prompt_tokens, num_forced_tokens, max_tokens, spec) == pool


def test_each_pool_has_its_own_limits() -> None:
    spec = fake_spec(
        pools=(slot_pool(4, snapstream(4, 32, 28, SCORER), 1024), slot_pool(1, full(256), 1024)),
        max_model_len=1024,
    )
    in_full = replace(request("a", 200, 56), pool=1)
    assert refusal(in_full, spec) is None
    assert not needs_scratch(in_full, spec)
    assert needs_scratch(replace(in_full, pool=0), spec)
    message = "up to 57 tokens are requested, but policy full admits at most 56 after 200 prompt tokens"
    assert refusal(replace(request("a", 200, 57), pool=1), spec) == message
    assert refusal(replace(request("a", 200, 57), pool=0), spec) is None


@pytest.mark.parametrize(
    ("add", "reason", "field"),
    [
        (request("a", 0), RefusalReason.NO_TOKENS, None),
        (request("a", stop_token_ids=frozenset({999})), RefusalReason.TOKEN_ID, "stop_token_ids"),
        (
            request("a", sampling=SamplingParams(logit_bias=((999, 2.0),))),
            RefusalReason.TOKEN_ID,
            "logit_bias",
        ),
        (request("a", 10, num_prefill_tokens=11), RefusalReason.PREFILL_LENGTH, None),
        (request("a", 1000, 25), RefusalReason.CONTEXT_LENGTH, None),
    ],
)
def test_a_refusal_names_its_reason(add: Add, reason: RefusalReason, field: str | None) -> None:
    with pytest.raises(RefusedError) as error:
        admit(add, SPEC)
    assert (error.value.refusal.reason, error.value.refusal.field) == (reason, field)


@pytest.mark.parametrize("num_forced_tokens", [1, 4, 9])
def test_a_slot_is_exact_up_to_as_many_tokens_however_they_are_read(num_forced_tokens: int) -> None:
    num_exact = exact_output_tokens(10, 0, SPEC, 0)
    assert exact_output_tokens(10, num_forced_tokens, SPEC, 0) == num_exact > 0
