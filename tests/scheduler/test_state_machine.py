"""Anything may happen at any time: requests, hang-ups, stop strings, deadlines, failing steps.

What was promised holds all the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from backends.fake import fake_spec, slot_pool
from backends.fake_model import expected_tokens
from backends.interface import BackendError, Batch, DecodeBatch, PrefillShape, PrefixSpec, SamplingParams
from cache.policy import full, snapstream
from cache.scorer import WindowScorer
from cache.scratch import ScratchLayout
from scheduler.config import SchedulerConfig
from scheduler.messages import Abort, Add, AdmittedAdd, Finish, FinishReason, ResetPrefixes
from scheduler.waiting import QueueOrder
from tests.scheduler.drive import GREEDY, Drive, Key, answer, request

POLICY = snapstream(
    2, 16, 14, WindowScorer(observation_window=4)
)  # prompts over 32 tokens go through scratch
SHAPES = (PrefillShape(1, 16), PrefillShape(3, 16), PrefillShape(2, 48))


class Faults(Mapping[int, BackendError]):
    """Fails the next steps on request."""

    def __init__(self) -> None:
        self.num_next = 0

    def __getitem__(self, step: int) -> BackendError:
        if not self.num_next:
            raise KeyError(step)
        self.num_next -= 1
        return BackendError("a fault of the test")

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


def step_time(batch: Batch) -> float:
    return 0.01 * batch.num_steps if isinstance(batch, DecodeBatch) else 0.02


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        order=st.sampled_from(QueueOrder),
        num_slots=st.integers(1, 4),
        num_scratch=st.integers(1, 2),
        scratch=st.sampled_from([ScratchLayout(256), ScratchLayout(48, 10, 4)]),
        max_num_waiting=st.integers(0, 8),
        latency=st.sampled_from([0.0, 0.05, 1.0]),
        num_blocks=st.sampled_from([0, 5, 40]),
    )
    def start(
        self,
        order: QueueOrder,
        num_slots: int,
        num_scratch: int,
        scratch: ScratchLayout,
        max_num_waiting: int,
        latency: float,
        num_blocks: int,
    ) -> None:
        self.order = order
        self.faults = Faults()
        spec = fake_spec(
            pools=(
                slot_pool(num_slots, POLICY, 256, max_draft_tokens=7),
                slot_pool(2, full(140), 256, max_draft_tokens=5),
            ),
            num_scratch=num_scratch,
            scratch=scratch,
            max_model_len=256,
            vocab_size=16,  # so that stop tokens come up
            prefill_shapes=SHAPES,
            prefixes=PrefixSpec(num_blocks, block_tokens=8, block_bytes=64),
        )
        config = SchedulerConfig(
            order=order, max_num_waiting=max_num_waiting, max_inter_token_latency=latency
        )
        self.drive = Drive(spec, config, step_time=step_time, faults=self.faults)
        self.adds: dict[str, Add] = {}
        self.cuts: dict[Key, int] = {}

    @rule(
        num_prompt_tokens=st.integers(1, 120),
        max_tokens=st.integers(0, 12),
        num_choices=st.integers(1, 6),
        temperature=st.sampled_from([0.0, 1.0]),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.frozensets(st.integers(0, 15), max_size=3),
        priority=st.integers(-1, 1),
        timeouts=st.tuples(*[st.none() | st.floats(0.0, 0.5)] * 2),
        num_prompt_logprobs=st.none() | st.integers(0, 2),
        is_background=st.booleans(),
        pool=st.sampled_from([0, 0, 1]),
        prefill_share=st.none() | st.floats(0.0, 1.0),
        tenant=st.sampled_from("ab"),
        prefix=st.sampled_from(["", "", "first", "next turn"]),
        num_predicted=st.integers(0, 12),
    )
    def add(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        num_choices: int,
        temperature: float,
        min_tokens: int,
        stop_token_ids: frozenset[int],
        priority: int,
        timeouts: tuple[float | None, float | None],
        num_prompt_logprobs: int | None,
        is_background: bool,
        pool: int,
        prefill_share: float | None,
        tenant: str,
        prefix: str,
        num_predicted: int,
    ) -> None:
        name = f"r{len(self.adds)}"
        base = request(
            name,
            num_prompt_tokens,
            max_tokens,
            num_choices=num_choices,
            sampling=SamplingParams(temperature=temperature, seed=len(self.adds)),
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            arrival_time=self.drive.clock.now(),
            priority=priority,
            queue_timeout=timeouts[0],
            timeout=timeouts[1],
            num_prompt_logprobs=num_prompt_logprobs,
        )
        prompt = tuple(token_id % 16 for token_id in base.prompt_token_ids)
        if prefix and self.adds:
            earlier = next(iter(self.adds.values())) if prefix == "first" else list(self.adds.values())[-1]
            answered = answer(earlier, self.drive.spec) if prefix == "next turn" else []
            prompt = (*earlier.prompt_token_ids, *answered, *prompt)[: max(num_prompt_tokens, 1)]
        self.adds[name] = Add(
            name,
            prompt,
            base.sampling,
            base.stop,
            base.arrival_time,
            num_choices,
            priority,
            timeouts[0],
            timeouts[1],
            num_prompt_logprobs,
            num_prefill_tokens=None
            if prefill_share is None
            else max(1, round(prefill_share * num_prompt_tokens)),
            is_background=is_background,
            tenant=tenant,
            pool=pool,
            cache_salt=tenant,
        )
        # Right up to some token, then wrong.
        predicted = answer(self.adds[name], self.drive.spec)[:num_predicted]
        self.adds[name] = replace(self.adds[name], prediction_token_ids=(*predicted, 3, 1, 4))
        self.drive.send(AdmittedAdd(self.adds[name]))

    @precondition(lambda self: self.adds)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.drive.send(Abort(data.draw(st.sampled_from(sorted(self.adds)))))

    @precondition(lambda self: self.open_choices())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """A stop string is found in tokens that were delivered."""
        key = data.draw(st.sampled_from(self.open_choices()))
        if key not in self.cuts:
            self.cuts[key] = data.draw(st.integers(0, len(self.drive.tokens(*key))))
            self.drive.send(Finish(*key, self.cuts[key]))

    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.drive.step()
            self.check_background()

    @rule()
    def reset_prefixes(self) -> None:
        self.drive.send(ResetPrefixes())

    @rule(num_steps=st.integers(1, 4))
    def next_steps_fail(self, num_steps: int) -> None:
        self.faults.num_next = num_steps

    @rule(seconds=st.floats(0.0, 0.2))
    def time_goes_by(self, seconds: float) -> None:
        self.drive.clock.elapse(seconds)

    def open_choices(self) -> list[Key]:
        return sorted(key for key, outputs in self.drive.outputs.items() if outputs[-1].final is None)

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        self.drive.run(max_steps=2000)
        stats = self.drive.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_slots_in_use, stats.num_scratch_in_use) == (
            0,
            0,
            0,
            0,
        )
        assert set(self.drive.outputs) == {
            (name, choice) for name, add in self.adds.items() for choice in range(add.num_choices)
        }
        discarded = 0
        for name, choice in self.drive.outputs:
            self.check_choice(self.adds[name], choice)
            discarded += self.drive.final(name, choice).num_discarded_tokens
        assert stats.num_discarded_tokens == discarded
        self.check_order()

    def check_choice(self, add: Add, choice: int) -> None:
        key, final, tokens = (
            (add.request_id, choice),
            self.drive.final(add.request_id, choice),
            self.drive.tokens(add.request_id, choice),
        )
        assert final.num_cached_tokens % 8 == 0
        assert 0 <= final.num_accepted_tokens <= final.num_draft_tokens
        assert final.num_cached_tokens < max(1, len(add.prompt_token_ids) - add.num_forced_tokens)
        assert final.num_cached_tokens == 0 or add.num_prompt_logprobs is None
        whole = answer(add, self.drive.spec, choice)
        assert tokens == whole[: len(tokens)]
        if final.reason is FinishReason.LENGTH:
            assert len(tokens) == final.num_output_tokens == add.stop.max_tokens
        elif final.stop_token_id is not None:
            assert tokens == whole
            assert (final.reason, final.num_output_tokens) == (FinishReason.STOP, len(whole) + 1)
            assert final.stop_token_id in add.stop.stop_token_ids
        elif final.reason is FinishReason.STOP:
            assert final.num_output_tokens == self.cuts[key]
        scores = [output.prompt_logprobs for output in self.drive.outputs[key] if output.prompt_logprobs]
        is_scored = add.num_prompt_logprobs is not None and choice == 0 and len(add.prompt_token_ids) > 1
        if final.timing.first_token is not None or final.reason is FinishReason.LENGTH:
            expected = [add.prompt_token_ids[1:]] if is_scored else []
            assert [tuple(token.token_id for token in score) for score in scores] == expected
            assert final.num_packed_prompt_tokens == max(add.num_forced_tokens - 1, 0)
            assert final.num_prefill_output_tokens == (
                add.num_forced_tokens == 0 and final.num_output_tokens > 0
            )
        if scores and add.num_prompt_logprobs:
            assert [token.top_logprobs[0][0] for token in scores[0]] == likeliest(add)

    def check_background(self) -> None:
        """What runs in the background leaves half of the slots to the rest."""
        holders = [request.add for request in self.drive.scheduler.live() if request.slot is not None]
        for number, pool in enumerate(self.drive.spec.pools):
            assert sum(add.is_background for add in holders if add.pool == number) <= max(
                1, pool.num_slots // 2
            )

    def check_order(self) -> None:
        """In the direct and the scratch line, requests of one priority or tenant are admitted in order."""
        lines: dict[tuple[int, bool, bool, int | str], list[float]] = {}
        limits = [pool.max_direct_tokens for pool in self.drive.spec.pools]
        for name, add in self.adds.items():
            needs_scratch = (
                not add.needs_slot or len(add.prompt_token_ids) - add.num_forced_tokens > limits[add.pool]
            )
            levels: dict[QueueOrder, int | str] = {
                QueueOrder.FAIR: add.tenant,
                QueueOrder.PRIORITY: add.priority,
                QueueOrder.FCFS: 0,
            }
            line = (add.pool, needs_scratch, add.is_background, levels[self.order])
            admitted = [self.drive.final(name, choice).timing.admitted for choice in range(add.num_choices)]
            lines.setdefault(line, []).extend(time for time in admitted if time is not None)
        assert all(times == sorted(times) for times in lines.values()), lines


def likeliest(add: Add) -> list[int]:
    """The token that would have followed each of the prompt's tokens but the last."""
    return [
        expected_tokens(add.prompt_token_ids[:end], GREEDY, 1, vocab_size=16)[0]
        for end in range(1, len(add.prompt_token_ids))
    ]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
