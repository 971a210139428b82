from backends.clock import WallClock
from backends.fake import FakeBackend, fake_spec
from bench.systems.closed_loop import run_engine
from commands.loadtest.answer import Answer, Failure
from commands.loadtest.prompts import Prompt
from scheduler.config import SchedulerConfig


def test_every_prompt_is_answered_in_full() -> None:
    prompts = [Prompt((1, 2, 3, index), 5 + index) for index in range(10)]
    run = run_engine(FakeBackend(), SchedulerConfig(), WallClock(), prompts, 3)
    answers = [outcome for outcome in run.outcomes if isinstance(outcome, Answer)]
    assert [(answer.num_input_tokens, answer.num_output_tokens) for answer in answers] == [
        (4, 5 + index) for index in range(10)
    ]
    assert all(answer.sent <= answer.contents[0] <= answer.contents[-1] == answer.ended for answer in answers)


def test_requests_in_flight_do_not_exceed_max_concurrency() -> None:
    prompts = [Prompt((1, 2, index), 8) for index in range(9)]
    run = run_engine(FakeBackend(fake_spec(num_slots=8)), SchedulerConfig(), WallClock(), prompts, 2)
    answers = sorted(
        (outcome for outcome in run.outcomes if isinstance(outcome, Answer)), key=lambda answer: answer.sent
    )
    assert len(answers) == 9
    in_flight = [sum(other.sent <= answer.sent < other.ended for other in answers) for answer in answers]
    assert max(in_flight) == 2


def test_rejected_request_is_a_failure() -> None:
    run = run_engine(
        FakeBackend(fake_spec(max_model_len=64)),
        SchedulerConfig(),
        WallClock(),
        [Prompt((1,) * 60, 9), Prompt((1,), 9)],
        None,
    )
    rejected, answered = run.outcomes
    assert isinstance(rejected, Failure)
    assert rejected.reason == "rejected"
    assert "64" in rejected.detail
    assert isinstance(answered, Answer)
