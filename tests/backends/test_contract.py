"""What every backend promises, asked of each through the real scheduler and engine.

Greedy or seeded, a request's tokens depend on the request alone: not on its neighbours, its slot, who had the
slot before, the chunks its prompt was read in or the steps of a launch.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from backends.clock import VirtualClock
from backends.fake import FakeBackend, fake_spec, slot_pool
from backends.interface import Backend, Feature, PrefillShape, SampledToken, SamplingParams
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import KVCacheDtype, PoolOptions
from cache.scorer import WindowScorer
from scheduler.admission import RefusedError, admit
from scheduler.config import SchedulerConfig
from scheduler.constraints import Allowed
from scheduler.engine import EngineCore
from scheduler.messages import Abort, Add, EngineInput, EngineOutput, FinishReason, StopCriteria
from scheduler.scheduler import Scheduler

NUM_SLOTS = 4
MAX_MODEL_LEN = 256
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, seed=11)
POLICIES = {
    "full": PolicyOptions(PolicyName.FULL),
    # 32 entries: longer prompts go through scratch, and every answer here wraps its ring
    "snapstream": PolicyOptions(
        slot_capacity=32, num_sink=2, num_recent=12, num_kept=18, scorer=WindowScorer(observation_window=4)
    ),
}
CHECKPOINTS = {"torch": "llama", "compiled": "llama", "latent": "deepseek-v3", "recurrent": "lfm2"}

STEP = 0.02  # nats of a token's log-probability
Choice = tuple[str, int]


TWO_POOLS = (
    PoolOptions(2, POLICIES["snapstream"]),
    PoolOptions(3, PolicyOptions(PolicyName.FULL, slot_capacity=200)),
)


def fake_backend(pools: tuple[PoolOptions, ...]) -> Backend:
    shapes = (PrefillShape(1, 8), PrefillShape(4, 8), PrefillShape(1, 32))
    specs = [
        slot_pool(pool.num_slots, pool.policy.resolve(MAX_MODEL_LEN), MAX_MODEL_LEN, pool.label)
        for pool in pools
    ]
    return FakeBackend(
        fake_spec(max_model_len=MAX_MODEL_LEN, pools=specs, vocab_size=320, prefill_shapes=shapes)
    )


@pytest.fixture(scope="module")
def open_torch(
    tmp_path_factory: pytest.TempPathFactory, compile_cache: Path
) -> Callable[[str, tuple[PoolOptions, ...]], Backend]:
    from backends.torch_backend.backend import TorchBackend
    from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
    from tests.backends.checkpoints import save_checkpoint

    paths = {
        kind: save_checkpoint(name, tmp_path_factory.mktemp("checkpoints"))
        for kind, name in CHECKPOINTS.items()
    }

    def open_backend(kind: str, pools: tuple[PoolOptions, ...]) -> Backend:
        config = TorchBackendConfig(
            str(paths[kind]),
            device=DeviceName.CPU,
            dtype=DtypeName.FLOAT32,
            pools=pools,
            max_model_len=MAX_MODEL_LEN,
            num_scratch=2,
            prefill_chunk=32,
            compile=kind == "compiled",
            compile_cache=compile_cache,
        )
        backend = TorchBackend(
            config, VirtualClock()
        )  # a clock that does not move: the schedule does not depend on the machine
        backend.warmup()
        if backend.compiled is not None:
            backend.compiled.wait()
        return backend

    return open_backend


@pytest.fixture(
    scope="module",
    params=[
        "fake-full",
        "fake-snapstream",
        "torch-full",
        "torch-snapstream",
        "latent-snapstream",
        pytest.param("recurrent-snapstream", marks=pytest.mark.long),
        "torch-int8",
        "torch-fp8",
        pytest.param("compiled-int8", marks=pytest.mark.long),  # compiling takes a minute
    ],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    """One backend for all tests of a kind, so that each also finds the slots as others left them."""
    kind, policy = request.param.split("-")
    if policy in list(KVCacheDtype):
        pool = PoolOptions(NUM_SLOTS, POLICIES["snapstream"], kv_cache_dtype=KVCacheDtype(policy))
        with pytest.MonkeyPatch.context() as patch:
            if policy == KVCacheDtype.FP8:  # refused on a processor, whose kernels do not read it
                patch.setattr("backends.torch_backend.backend.check_cache_dtypes", lambda *_: None)
            return opened(request, kind, (pool,))
    return opened(request, kind, (PoolOptions(NUM_SLOTS, POLICIES[policy]),))


def opened(request: pytest.FixtureRequest, kind: str, pools: tuple[PoolOptions, ...]) -> Backend:
    if kind == "fake":
        return fake_backend(pools)
    backend: Backend = request.getfixturevalue("open_torch")(kind, pools)
    return backend


def prompt(name: str, num_tokens: int) -> tuple[int, ...]:
    base = sum(map(ord, name))
    return tuple((base * (index + 3) + 31 * index * index) % 317 for index in range(num_tokens))


def ask(
    name: str,
    num_prompt_tokens: int = 9,
    max_tokens: int = 24,
    sampling: SamplingParams = GREEDY,
    num_choices: int = 1,
) -> Add:
    return Add(name, prompt(name, num_prompt_tokens), sampling, StopCriteria(max_tokens), 0.0, num_choices)


# Prompts that fit a slot, that need several chunks, and that go through scratch; greedy, seeded, with
# penalties; of several choices; and two of which decode reads a part.
CROWD = (
    ask("a", 1),
    ask("b", 9, sampling=SEEDED),
    ask("c", 30, sampling=SamplingParams(temperature=0.7, top_p=0.9, top_k=50, seed=5, presence_penalty=0.5)),
    ask("d", 31, max_tokens=40),
    ask("e", 33, num_choices=3, sampling=SEEDED),
    ask("f", 100, sampling=SEEDED),
    ask("g", 150, max_tokens=5),
    ask("h", 12, num_choices=6, max_tokens=10, sampling=SamplingParams(temperature=1.3, min_p=0.02, seed=9)),
    replace(ask("i", 60, max_tokens=10, sampling=SEEDED), num_prefill_tokens=20),
    replace(
        ask("j", 70, num_choices=2, sampling=replace(SEEDED, repetition_penalty=1.2, presence_penalty=0.5)),
        num_prefill_tokens=45,
    ),
)


class ResidueMatcher:
    """A grammar of numbers: the first token is a multiple of 3, the second is 1 modulo 3, and so on."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._num_tokens = vocab_size, 0

    def allowed(self) -> Allowed:
        mask = bytearray(-(-self._vocab_size // 8))
        for token_id in range(self._num_tokens % 3, self._vocab_size, 3):
            mask[token_id // 8] |= 1 << token_id % 8
        return Allowed(bytes(mask), may_end=False)

    def advance(self, token_id: int) -> None:
        assert token_id % 3 == self._num_tokens % 3
        self._num_tokens += 1


class Residues:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def matchers(self, grammar: str, number: int) -> list[ResidueMatcher]:
        assert grammar == "residues"
        return [ResidueMatcher(self._vocab_size) for _ in range(number)]


class Conversation:
    """An engine over `backend`, and what it answers."""

    def __init__(self, backend: Backend, max_decode_steps: int = 4) -> None:
        clock, config = VirtualClock(), SchedulerConfig(max_decode_steps=max_decode_steps)
        self.spec = backend.spec
        self.scheduler = Scheduler(backend.spec, config, clock, Residues(backend.spec.vocab_size))
        self.inbox: SimpleQueue[EngineInput] = SimpleQueue()
        self.core = EngineCore(self.scheduler, backend, clock, self.inbox)
        self.outputs: list[EngineOutput] = []

    def send(self, *messages: Add | Abort) -> None:
        for message in messages:
            self.inbox.put(admit(message, self.spec) if isinstance(message, Add) else message)

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.scheduler.has_work or not self.inbox.empty():
                self.core.step()
                self.outputs += self.scheduler.take_outputs()

    def finish(self) -> "Conversation":
        while self.scheduler.has_work or not self.inbox.empty():
            self.steps(1)
        return self

    def sampled(self, name: str, choice: int = 0) -> list[SampledToken]:
        return [
            token
            for output in self.outputs
            if (output.request_id, output.choice) == (name, choice)
            for token in output.tokens
        ]

    def answers(self) -> dict[Choice, list[int]]:
        """The tokens of every choice, all of which were served to their end."""
        reasons = {output.final.reason for output in self.outputs if output.final is not None}
        assert reasons <= {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}, self.outputs
        choices = {(output.request_id, output.choice) for output in self.outputs}
        return {choice: [token.token_id for token in self.sampled(*choice)] for choice in choices}


def converse(backend: Backend, *adds: Add, max_decode_steps: int = 4) -> dict[Choice, list[int]]:
    conversation = Conversation(backend, max_decode_steps)
    conversation.send(*adds)
    return conversation.finish().answers()


@pytest.fixture(scope="module")
def alone(backend: Backend) -> dict[Choice, list[int]]:
    """What each of the crowd is answered when it is the only one there."""
    return {choice: tokens for add in CROWD for choice, tokens in converse(backend, add).items()}


def test_answers_have_their_length_and_differ(alone: dict[Choice, list[int]]) -> None:
    for add in CROWD:
        assert {len(alone[add.request_id, choice]) for choice in range(add.num_choices)} == {
            add.stop.max_tokens
        }
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)


def test_results_repeat(backend: Backend, alone: dict[Choice, list[int]]) -> None:
    assert {choice: tokens for add in CROWD for choice, tokens in converse(backend, add).items()} == alone


def test_a_row_of_a_batch_equals_the_single_row(backend: Backend, alone: dict[Choice, list[int]]) -> None:
    assert converse(backend, *CROWD) == alone
    assert converse(backend, *reversed(CROWD)) == alone


def test_neighbours_may_join_and_leave_at_any_step(backend: Backend, alone: dict[Choice, list[int]]) -> None:
    conversation = Conversation(backend)
    for position, add in enumerate(CROWD):
        conversation.send(
            replace(ask(f"gone {position}", 5 + 13 * position), num_choices=1 + position % 2), add
        )
        conversation.steps(3 + position)
        conversation.send(Abort(f"gone {position}"))
    answers = conversation.finish().answers()
    assert {choice: answers[choice] for choice in alone} == alone


def test_steps_of_a_launch_change_nothing(backend: Backend, alone: dict[Choice, list[int]]) -> None:
    for add in CROWD:
        answers = converse(backend, add, max_decode_steps=1)
        assert answers == {choice: alone[choice] for choice in answers}


def test_seeds_and_choices_draw_differently(backend: Backend) -> None:
    def seeded(seed: int) -> dict[Choice, list[int]]:
        return converse(backend, ask("a", num_choices=2, sampling=replace(SEEDED, seed=seed)))

    first, second = seeded(1), seeded(2)
    assert len({tuple(tokens) for answers in (first, second) for tokens in answers.values()}) == 4
    assert seeded(1) == first


def test_logprobs_are_of_the_models_own_distribution(backend: Backend) -> None:
    """The greedy token leads; neither temperature nor bias moves the figures of the first token."""
    plain, warm = Conversation(backend), Conversation(backend)
    plain.send(ask("a", sampling=replace(GREEDY, num_logprobs=5)))
    biased = replace(SEEDED, temperature=2.0, logit_bias=((7, 50.0),), num_logprobs=5)
    warm.send(ask("a", sampling=biased))
    tokens = plain.finish().sampled("a")
    for token in tokens:
        logprobs = [logprob for _, logprob in token.top_logprobs]
        assert len(logprobs) == 5
        assert logprobs == sorted(logprobs, reverse=True)
        assert 0.0 < sum(map(math.exp, logprobs)) <= 1.0 + 1e-5
        assert (token.token_id, token.logprob) == token.top_logprobs[0]
    first = warm.finish().sampled("a")[0]
    assert first.token_id == 7
    assert [token_id for token_id, _ in first.top_logprobs] == [
        token_id for token_id, _ in tokens[0].top_logprobs
    ]
    assert [logprob for _, logprob in first.top_logprobs] == pytest.approx(
        [logprob for _, logprob in tokens[0].top_logprobs], abs=1e-4
    )


def test_alternatives_are_the_requested_number(backend: Backend) -> None:
    conversation = Conversation(backend)
    conversation.send(ask("none"), ask("own", sampling=replace(GREEDY, num_logprobs=0)))
    conversation.finish()
    assert all(token.logprob is None and not token.top_logprobs for token in conversation.sampled("none"))
    assert all(token.logprob is not None and not token.top_logprobs for token in conversation.sampled("own"))


def test_named_tokens_have_their_logprobs(backend: Backend) -> None:
    conversation = Conversation(backend)
    likeliest = replace(GREEDY, num_logprobs=5)
    conversation.send(ask("top", sampling=likeliest), ask("plain"))
    top = conversation.finish().sampled("top")[0].top_logprobs
    named = tuple(token_id for token_id, _ in reversed(top))
    again = Conversation(backend)
    again.send(ask("top", sampling=replace(GREEDY, num_logprobs=1, logprob_token_ids=named)), ask("plain"))
    (first, *_) = again.finish().sampled("top")
    assert [token_id for token_id, _ in first.named_logprobs] == list(named)
    assert [logprob for _, logprob in first.named_logprobs] == pytest.approx(
        [logprob for _, logprob in reversed(top)], abs=1e-4
    )
    assert len(first.top_logprobs) == 1
    assert not any(token.named_logprobs for token in again.sampled("plain"))


@pytest.mark.parametrize("num_prompt_tokens", [2, 9, 100])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_logprobs_agree_with_greedy_decoding(
    backend: Backend, num_prompt_tokens: int, max_tokens: int
) -> None:
    """One for each prompt token but the first. Greedy decoding chooses the likeliest token."""
    conversation = Conversation(backend)
    next_token = converse(backend, ask("a", num_prompt_tokens, 1))["a", 0][0]
    longer = replace(ask("a", num_prompt_tokens, max_tokens), num_prompt_logprobs=3)
    longer = replace(longer, prompt_token_ids=(*longer.prompt_token_ids, next_token))
    conversation.send(longer)
    outputs = conversation.finish().outputs
    (scores,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    assert tuple(score.token_id for score in scores) == longer.prompt_token_ids[1:]
    assert scores[-1].top_logprobs[0][0] == next_token
    assert all(
        score.logprob is not None and score.logprob <= 0.0 and len(score.top_logprobs) == 3
        for score in scores
    )


@pytest.mark.parametrize("max_decode_steps", [1, 4])
@pytest.mark.parametrize("num_prefill_tokens", [1, 7, 20, 29, 30])
def test_tokens_read_by_decode_belong_to_the_prompt(
    backend: Backend, num_prefill_tokens: int, max_decode_steps: int
) -> None:
    """Nothing of these is evicted: answer and log-probabilities equal those of a prompt read by prefill."""
    sampling = replace(GREEDY, repetition_penalty=1.5, frequency_penalty=0.5, num_logprobs=1)
    whole = replace(ask("a", 30, max_tokens=2, sampling=sampling), num_prompt_logprobs=3)
    pool = backend.spec.pools[0]
    placement = pool.policy.place(num_prefill_tokens)
    num_held = placement.window_start + placement.ring_size - 1  # with one token of the answer
    if pool.kv_cache_dtype.is_rounded:
        # In a scratch, prefill would see exact keys where decode sees rounded ones.
        num_held = min(num_held, pool.max_direct_tokens)
    whole = replace(whole, prompt_token_ids=whole.prompt_token_ids[: max(num_prefill_tokens, num_held)])
    parted = replace(whole, num_prefill_tokens=num_prefill_tokens)
    outputs = []
    for add in (whole, parted):
        conversation = Conversation(backend, max_decode_steps)
        conversation.send(add)
        outputs.append(conversation.finish().outputs)
    (scores, tokens), (expected_scores, expected_tokens) = (
        [
            [token for output in outputs_of_choice for token in getattr(output, name)]
            for name in ("prompt_logprobs", "tokens")
        ]
        for outputs_of_choice in outputs
    )
    # In 8 bits, a difference in the last bits can move a key or a value by a whole step.
    tolerance = STEP if pool.kv_cache_dtype.is_rounded else 1e-4
    for found, expected in ((scores, expected_scores), (tokens, expected_tokens)):
        assert [token.token_id for token in found] == [token.token_id for token in expected]
        assert [token.logprob for token in found] == pytest.approx(
            [token.logprob for token in expected], abs=tolerance
        )
        assert [len(token.top_logprobs) for token in found] == [len(token.top_logprobs) for token in expected]


def test_a_prompt_can_be_scored_from_its_slot(backend: Backend) -> None:
    conversation = Conversation(backend)
    conversation.send(
        replace(ask("a", 40, max_tokens=0, num_choices=2), num_prompt_logprobs=0, num_prefill_tokens=33)
    )
    outputs = conversation.finish().outputs
    (scores,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    assert tuple(score.token_id for score in scores) == prompt("a", 40)[1:]
    finals = [output.final for output in outputs if output.final is not None]
    assert [(final.num_packed_prompt_tokens, final.num_output_tokens) for final in finals] == [(6, 0)] * 2


def test_stop_tokens_are_banned_until_min_tokens(backend: Backend) -> None:
    free = converse(backend, ask("a"))["a", 0]
    stopped = converse(backend, replace(ask("a"), stop=StopCriteria(24, 0, frozenset(free[2:3]))))["a", 0]
    assert stopped == free[: free.index(free[2])]
    unstopped = converse(backend, replace(ask("a"), stop=StopCriteria(24, 6, frozenset(free))))["a", 0]
    assert len(unstopped) >= 6
    assert not set(unstopped) & set(free)


def test_bias_chooses_and_excludes(backend: Backend) -> None:
    free = converse(backend, ask("a"))["a", 0]
    assert set(converse(backend, ask("a", sampling=replace(GREEDY, logit_bias=((42, 1000.0),))))["a", 0]) == {
        42
    }
    excluded = tuple((token_id, -1000.0) for token_id in set(free))
    assert not set(converse(backend, ask("a", sampling=replace(GREEDY, logit_bias=excluded)))["a", 0]) & set(
        free
    )


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_of_the_output_overcome_a_bias_that_would_repeat_one_token(
    backend: Backend, penalty: str
) -> None:
    biased = replace(GREEDY, logit_bias=((42, 20.0),))
    assert converse(backend, ask("a", sampling=biased))["a", 0].count(42) > 10
    penalised = (
        replace(biased, presence_penalty=1e3)
        if penalty == "presence_penalty"
        else replace(biased, frequency_penalty=1e3)
    )
    tokens = converse(backend, ask("a", sampling=penalised))["a", 0]
    assert len(set(tokens)) == len(tokens)


def test_repetition_penalty_is_of_prompt_and_output(backend: Backend) -> None:
    """Most of the vocabulary is in the prompt."""
    plain = replace(ask("a"), prompt_token_ids=tuple(range(0, 320, 3)) + tuple(range(1, 320, 3)))
    assert set(converse(backend, plain)["a", 0]) & set(plain.prompt_token_ids)
    tokens = converse(backend, replace(plain, sampling=replace(GREEDY, repetition_penalty=1e3)))["a", 0]
    assert not set(tokens) & set(plain.prompt_token_ids)
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SEEDED, SamplingParams(temperature=2.0, top_p=0.9, top_k=40, presence_penalty=1.0, seed=2)],
)
def test_a_mask_applies_to_its_row_only(backend: Backend, sampling: SamplingParams) -> None:
    bound = [
        replace(ask(f"bound{size}", size, sampling=sampling, num_choices=2), grammar="residues")
        for size in (9, 100)
    ]
    others = [ask("a", 9, sampling=sampling), ask("b", 60)]
    together = converse(backend, *bound, *others)
    for add in bound:
        for choice in range(2):
            tokens = together[add.request_id, choice]
            assert [token % 3 for token in tokens] == [index % 3 for index in range(24)]
            assert tokens == converse(backend, add)[add.request_id, choice]
    assert {key: together[key] for key in [("a", 0), ("b", 0)]} == converse(backend, *others)


@pytest.mark.parametrize("kind", ["fake", "torch"])
def test_pools_know_nothing_of_each_other(kind: str, request: pytest.FixtureRequest) -> None:
    """Each sequence is answered as by a backend with its pool only, while others run and are aborted."""
    adds = [replace(add, request_id=f"{add.request_id}{pool}", pool=pool) for add in CROWD for pool in (0, 1)]
    conversation = Conversation(opened(request, kind, TWO_POOLS))
    conversation.send(*adds)
    conversation.steps(9)
    conversation.send(*(replace(ask(f"gone{pool}", 90), pool=pool) for pool in (0, 1)))
    conversation.steps(20)
    conversation.send(Abort("gone0"), Abort("gone1"))
    while conversation.scheduler.has_work:
        conversation.steps(1)
        conversation.scheduler.check_integrity()
    together = conversation.answers()
    for pool, options in enumerate(TWO_POOLS):
        alone = opened(request, kind, (options,))
        for add in CROWD:
            for (_, choice), tokens in converse(alone, add).items():
                assert together[f"{add.request_id}{pool}", choice] == tokens, (add.request_id, pool)


@pytest.mark.long
def test_slots_in_8_bits_are_read_the_same_compiled_and_beside_another_pool(
    request: pytest.FixtureRequest,
) -> None:
    """The scores of given tokens, most of which are read from a slot."""
    exact = PoolOptions(NUM_SLOTS, POLICIES["snapstream"], "exact")
    rounded = replace(exact, name="rounded", kv_cache_dtype=KVCacheDtype.INT8)
    compiled = opened(request, "compiled", (exact, rounded))
    add = replace(ask("a", 100, max_tokens=0), num_prompt_logprobs=0, num_prefill_tokens=40)

    def scores(backend: Backend, pool: int) -> list[float | None]:
        conversation = Conversation(backend)
        conversation.send(replace(add, pool=pool))
        outputs = conversation.finish().outputs
        return [token.logprob for output in outputs for token in output.prompt_logprobs]

    found = scores(compiled, 1)
    assert len(found) == 99
    assert found == pytest.approx(scores(opened(request, "torch", (rounded,)), 0), abs=STEP)
    assert found != scores(compiled, 0) == pytest.approx(found, abs=10 * STEP)


def test_an_undeclared_feature_is_refused_by_name() -> None:
    spec = FakeBackend(fake_spec(features=frozenset())).spec
    assert admit(ask("greedy"), spec)
    with pytest.raises(RefusedError, match=Feature.SAMPLING.value):
        admit(ask("sampled", sampling=SEEDED), spec)
