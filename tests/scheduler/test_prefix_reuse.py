"""Which tokens of a prompt are read and which are restored, over the fake backend.

The fake backend checks that restored blocks hold the prompt's tokens, and its answers depend on all of them.
"""

from dataclasses import replace

import pytest

from backends.fake import FakeBackend, fake_spec, slot_pool
from backends.interface import (
    ArchiveStats,
    BackendError,
    BackendSpec,
    PrefillShape,
    PrefixSpec,
    PromptPooling,
    SlotPoolSpec,
)
from cache.policy import CachePolicy, full, snapstream
from cache.pool_options import KVCacheDtype
from cache.scorer import WindowScorer
from cache.scratch import ScratchLayout
from scheduler import prefix_reuse
from scheduler.config import SchedulerConfig
from scheduler.messages import Abort, FinishReason, ResetPrefixes
from scheduler.stats import StepKind
from scheduler.waiting import QueueOrder
from tests.scheduler.drive import Drive, answer, request

BLOCK = 8
DIRECT = full(256)
# A slot holds prompts of 32 tokens. Over 18 tokens, they are read in a scratch.
PACKED = snapstream(2, 16, 14, WindowScorer(observation_window=20))


def spec(
    policy: CachePolicy = DIRECT,
    *,
    num_slots: int = 4,
    num_blocks: int = 64,
    scratch: ScratchLayout | None = None,
) -> BackendSpec:
    return fake_spec(
        pools=(slot_pool(num_slots, policy, 256),),
        max_model_len=256,
        scratch=scratch,
        prefill_shapes=(PrefillShape(1, 32), PrefillShape(3, 32)),
        prefixes=PrefixSpec(num_blocks, BLOCK, 64),
    )


def prompt(length: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed + 7 * index) % 500 for index in range(length))


def num_read(drive: Drive) -> int:
    return sum(batch.num_tokens for batch in drive.batches if batch.kind is StepKind.PREFILL)


def asks(drive: Drive, name: str, tokens: tuple[int, ...], **options: object) -> int:
    """Run one request to its end, check its answer, and return how many tokens it did not have to read."""
    before = num_read(drive)
    add = request(name, prompt_token_ids=tokens, **options)  # type: ignore[arg-type]
    drive.run(add)
    final = drive.final(name)
    assert final.reason is FinishReason.LENGTH, final
    if add.pooling is None:
        assert drive.tokens(name) == answer(add, drive.spec)
    num_prefill_tokens = add.num_prefill_tokens or len(tokens)
    assert num_read(drive) - before == num_prefill_tokens - final.num_cached_tokens
    return final.num_cached_tokens


@pytest.mark.parametrize(
    ("policy", "scratch", "length", "expected"),
    [
        pytest.param(DIRECT, None, 100, 96, id="all whole blocks"),
        pytest.param(DIRECT, None, 96, 88, id="the last token is read"),
        pytest.param(DIRECT, None, 8, 0, id="a prompt of one block"),
        pytest.param(PACKED, None, 32, 24, id="a prompt that fits its slot"),
        pytest.param(PACKED, None, 100, 80, id="the observation window is read"),
        pytest.param(PACKED, ScratchLayout(48, 10, 4), 48, 24, id="a scratch that holds the prompt"),
        pytest.param(PACKED, ScratchLayout(48, 10, 4), 100, 40, id="a scratch before it evicts"),
    ],
)
def test_a_prompt_is_read_from_where_its_stored_blocks_end(
    policy: CachePolicy, scratch: ScratchLayout | None, length: int, expected: int
) -> None:
    drive = Drive(spec(policy, scratch=scratch))
    assert asks(drive, "cold", prompt(length)) == 0
    assert asks(drive, "hit", prompt(length)) == expected
    stats = drive.scheduler.stats().prefixes
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (2 * length, expected)


def test_prompts_share_what_they_have_in_common() -> None:
    drive = Drive(spec())
    asks(drive, "first", (*prompt(50), *prompt(30, seed=1)))
    assert asks(drive, "second", (*prompt(50), *prompt(30, seed=2))) == 48
    assert asks(drive, "third", (*prompt(50), *prompt(40, seed=1))) == 80 - 80 % BLOCK


def test_equal_prompts_that_arrive_together_restore_what_the_first_one_read() -> None:
    drive = Drive(spec(), SchedulerConfig(order=QueueOrder.FCFS))
    names = [f"r{index}" for index in range(8)]  # for four slots
    drive.run(*(request(name, prompt_token_ids=prompt(100)) for name in names))
    cached = [drive.final(name).num_cached_tokens for name in names]
    assert cached[0] == 0
    assert cached[4:] == [96] * 4


def test_the_next_turn_reads_no_answer() -> None:
    drive = Drive(spec())
    first = request("first", prompt_token_ids=prompt(40), max_tokens=30)
    drive.run(first)
    history = (*prompt(40), *drive.tokens("first"))  # its last token was sampled and never written
    assert asks(drive, "second", (*history, *prompt(20, seed=3))) == 64


def test_an_answer_that_lost_tokens_is_not_stored() -> None:
    drive = Drive(spec(PACKED))
    first = request("first", prompt_token_ids=prompt(24), max_tokens=40)
    drive.run(first)
    history = (*prompt(24), *drive.tokens("first"))
    assert asks(drive, "second", (*history, *prompt(40, seed=3))) == 24


def test_salts_share_nothing() -> None:
    drive = Drive(spec())
    asks(drive, "a", prompt(100), cache_salt="a")
    assert asks(drive, "b", prompt(100), cache_salt="b") == 0
    assert asks(drive, "again", prompt(100), cache_salt="a") == 96


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_prompt_logprobs": 1}, 0),
        ({"pooling": PromptPooling.MEAN, "max_tokens": 0}, 0),
        ({"pooling": PromptPooling.LAST, "max_tokens": 0}, 96),
        ({"num_choices": 3}, 96),
        ({"num_prefill_tokens": 50}, 48),
    ],
    ids=["prompt log-probabilities", "mean", "last", "choices", "forced tokens"],
)
def test_what_needs_all_hidden_states_reads_all(options: dict[str, object], expected: int) -> None:
    drive = Drive(spec())
    asks(drive, "cold", prompt(100), **options)  # its blocks are stored in any case
    assert asks(drive, "hit", prompt(100), **options) == expected
    assert asks(drive, "plain", prompt(50)) == 48


def test_the_budget_holds_and_the_oldest_prompt_goes_first() -> None:
    drive = Drive(spec(num_blocks=10))
    for seed in (1, 2, 3):
        asks(drive, f"r{seed}", prompt(40, seed=seed), max_tokens=1)
    assert asks(drive, "third", prompt(40, seed=3), max_tokens=1) == 32
    assert asks(drive, "second", prompt(40, seed=2), max_tokens=1) == 32
    assert asks(drive, "first", prompt(40, seed=1), max_tokens=1) == 0
    stats = drive.scheduler.stats().prefixes
    assert (stats.num_blocks, stats.num_evicted_blocks) == (10, 10)


def test_a_prompt_longer_than_the_store_keeps_its_beginning() -> None:
    drive = Drive(spec(num_blocks=3))
    asks(drive, "cold", prompt(200))
    assert asks(drive, "hit", prompt(200)) == 24


def test_a_reset_forgets_everything() -> None:
    drive = Drive(spec())
    asks(drive, "cold", prompt(100))
    drive.run(ResetPrefixes())
    assert drive.scheduler.stats().prefixes.num_blocks == 0
    assert asks(drive, "again", prompt(100)) == 0


def test_a_failed_step_stores_nothing() -> None:
    # The second of four chunks, and of the second try, which restores the first one.
    drive = Drive(spec(), faults=dict.fromkeys((1, 2), BackendError("a fault")))
    drive.run(request("failed", prompt_token_ids=prompt(100)))
    assert drive.final("failed").reason is FinishReason.ERROR
    assert asks(drive, "next", prompt(100)) == 32


def test_a_prompt_that_is_aborted_leaves_what_was_read() -> None:
    drive = Drive(spec())
    drive.send(request("aborted", prompt_token_ids=prompt(100)))
    drive.step()
    drive.run(Abort("aborted"))
    assert asks(drive, "next", prompt(100)) == 32


def test_without_a_store_everything_is_read() -> None:
    drive = Drive(fake_spec(max_model_len=256))
    asks(drive, "cold", prompt(100))
    assert asks(drive, "again", prompt(100)) == 0


def test_tenants_are_not_charged_for_restored_tokens() -> None:
    drive = Drive(spec(num_slots=1), SchedulerConfig(order=QueueOrder.FAIR), step_time=lambda _batch: 1.0)
    asks(drive, "warm", prompt(100), tenant="b", max_tokens=1)
    for index in range(4):
        drive.send(request(f"a{index}", prompt_token_ids=prompt(100, seed=index + 1), tenant="a"))
        drive.send(request(f"b{index}", prompt_token_ids=prompt(100), tenant="b"))
    drive.run()
    admitted = sorted(
        (drive.final(name).timing.admitted or 0, name) for name, _ in drive.outputs if name != "warm"
    )
    # A hit costs 4 tokens read and 5 generated, a miss 100 and 5: all hits go before the second miss.
    assert "".join(name[0] for _, name in admitted[:5]).count("b") == 4


def next_turn(drive: Drive, name: str, tokens: tuple[int, ...]) -> int:
    """Ask again with a request's prompt and answer before a new prompt; return the restored tokens."""
    return asks(drive, f"{name}-next", (*tokens, *drive.tokens(name), *prompt(40, seed=3)))


def test_an_answer_is_stored_only_while_its_slot_holds_every_token() -> None:
    """The ring of 16 holds what follows two sinks: 27 tokens do not fit, though a prompt of 27 would."""
    drive = Drive(spec(PACKED))
    drive.run(request("short", prompt_token_ids=prompt(10), max_tokens=9))
    assert next_turn(drive, "short", prompt(10)) == 16
    drive.run(ResetPrefixes(), request("long", prompt_token_ids=prompt(10), max_tokens=18))
    assert next_turn(drive, "long", prompt(10)) == 8


def test_an_answer_that_a_sliding_window_outgrew_is_not_stored() -> None:
    pools = (SlotPoolSpec(4, DIRECT, max_direct_tokens=32, max_exact_tokens=32, name="windows"),)
    drive = Drive(replace(spec(), pools=pools))
    drive.run(request("long", prompt_token_ids=prompt(24), max_tokens=20))
    assert next_turn(drive, "long", prompt(24)) == 24


@pytest.mark.parametrize(("length", "expected"), [(18, 0), (32, 24), (100, 80)])
def test_what_a_slot_in_8_bits_holds_is_neither_stored_nor_restored(length: int, expected: int) -> None:
    pools = (replace(spec(PACKED).pools[0], kv_cache_dtype=KVCacheDtype.INT8),)
    drive = Drive(replace(spec(PACKED), pools=pools))
    assert asks(drive, "cold", prompt(length)) == 0
    assert asks(drive, "hit", prompt(length)) == expected
    drive.run(ResetPrefixes(), request("short", prompt_token_ids=prompt(10), max_tokens=9))
    assert drive.scheduler.stats().prefixes.num_blocks == 0


def test_the_answer_of_a_failed_step_is_not_stored() -> None:
    drive = Drive(spec(), faults=dict.fromkeys((4, 5), BackendError("a fault")))  # two chunks, then decode
    drive.run(request("failed", prompt_token_ids=prompt(40), max_tokens=60))
    assert drive.final("failed").reason is FinishReason.ERROR
    assert len(drive.tokens("failed")) > 8
    assert next_turn(drive, "failed", prompt(40)) == 40


def test_a_prompt_that_ends_before_all_its_slots_are_filled_stores_none_of_them() -> None:
    drive = Drive(spec())
    drive.send(request("aborted", prompt_token_ids=prompt(100), num_choices=2))
    drive.step()
    drive.send(ResetPrefixes(), Abort("aborted"))
    drive.run()
    assert drive.scheduler.stats().prefixes.num_blocks == 0


class Archive:
    """Blocks of fake backends, in a dictionary that outlives them."""

    def __init__(self, held: dict[bytes, tuple[int, ...]]) -> None:
        self.held = held
        self.backend: FakeBackend | None = None
        self.num_loaded = 0

    def load(self, key: bytes, number: int) -> bool:
        assert self.backend is not None
        if key not in self.held:
            return False
        self.num_loaded += 1
        self.backend.put_block(number, self.held[key])
        return True

    def save(self, key: bytes, number: int) -> None:
        assert self.backend is not None
        self.held[key] = self.backend.block(number)

    def reset(self) -> None:
        self.held.clear()

    def stats(self) -> ArchiveStats:
        return ArchiveStats(self.num_loaded, num_held=len(self.held), is_saving=True)


def archived(held: dict[bytes, tuple[int, ...]], *, num_blocks: int = 64, num_slots: int = 4) -> Drive:
    backend = FakeBackend(spec(num_blocks=num_blocks, num_slots=num_slots))
    archive = Archive(held)
    archive.backend = backend
    backend.prefix_archive = archive
    return Drive(backend=backend)


@pytest.fixture
def two_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn of the loop loads two blocks."""
    monkeypatch.setattr(prefix_reuse, "_LOADED_AT_ONCE", 2 * 64)


@pytest.mark.usefixtures("two_loads")
def test_a_restarted_server_loads_what_was_archived() -> None:
    held: dict[bytes, tuple[int, ...]] = {}
    asks(archived(held), "cold", prompt(100))
    drive = archived(held)
    assert asks(drive, "hit", prompt(100)) == 96
    assert asks(drive, "again", prompt(100)) == 96
    assert isinstance(drive.backend.prefix_archive, Archive)
    assert drive.backend.prefix_archive.num_loaded == 12


@pytest.mark.usefixtures("two_loads")
def test_decode_goes_on_while_a_prompt_is_loaded() -> None:
    held: dict[bytes, tuple[int, ...]] = {}
    asks(archived(held), "cold", prompt(100))
    drive = archived(held)
    drive.send(request("decoding", prompt_token_ids=prompt(10, seed=9), max_tokens=100))
    drive.step()
    drive.step()
    drive.send(request("hit", prompt_token_ids=prompt(100)))
    num_before = len(drive.tokens("decoding"))
    for _ in range(5):
        drive.step()
    assert len(drive.tokens("decoding")) >= num_before + 5
    assert drive.tokens("hit") == []
    drive.run()
    assert drive.final("hit").num_cached_tokens == 96


@pytest.mark.usefixtures("two_loads")
@pytest.mark.parametrize("num_blocks", [1, 3, 13, 20])
def test_prompts_that_evict_each_others_loaded_blocks_end(num_blocks: int) -> None:
    """The fake backend checks that what is restored is the prompt's."""
    held: dict[bytes, tuple[int, ...]] = {}
    prompts = [prompt(100, seed=seed) for seed in range(6)]
    warm = archived(held)
    for seed, tokens in enumerate(prompts):
        asks(warm, f"cold{seed}", tokens, max_tokens=30)
    drive = archived(held, num_blocks=num_blocks, num_slots=3)
    adds = [
        request(f"r{seed}", prompt_token_ids=tokens, max_tokens=30) for seed, tokens in enumerate(prompts)
    ]
    for add in adds:
        drive.send(add)
        drive.step()
    drive.run()
    assert [drive.tokens(add.request_id) for add in adds] == [answer(add, drive.spec) for add in adds]


def test_a_reset_empties_the_archive() -> None:
    held: dict[bytes, tuple[int, ...]] = {}
    drive = archived(held)
    asks(drive, "cold", prompt(100))
    assert len(held) == 12
    drive.run(ResetPrefixes())
    assert held == {}
    assert asks(drive, "again", prompt(100)) == 0


def test_a_failed_step_archives_nothing() -> None:
    held: dict[bytes, tuple[int, ...]] = {}
    backend = FakeBackend(spec(), faults=dict.fromkeys((1, 2), BackendError("a fault")))
    archive = Archive(held)
    archive.backend = backend
    backend.prefix_archive = archive
    Drive(backend=backend).run(request("failed", prompt_token_ids=prompt(100)))
    assert len(held) == 4
