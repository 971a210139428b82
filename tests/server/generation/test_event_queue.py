"""The queue between engine and client: order, ends, errors, lag, and the number of open prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from backends.interface import SampledToken
from scheduler.messages import AdmittedAdd, EngineOutput, Final, FinishReason, Timing
from server.engine.client import EngineClient
from server.engine.tickets import SequenceLimit
from server.generation.decoder import Decoder, TextOptions
from server.generation.event_queue import EventQueue
from server.generation.events import ChoiceDelta, Event, GenerationError, Progress, SlowReaderError
from server.generation.failures import as_api_error
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.server.engines import add_of
from tests.server.text.tokenizers import byte_level

RENDERER = Renderer(Tokenizer(byte_level()))
LENGTH = Final(FinishReason.LENGTH, Timing(0, None, None, 0), 3, 2)
ERROR = Final(FinishReason.ERROR, Timing(0, None, None, 0), 3, 0, message="lost")


@dataclass
class HandFedClient:
    """An engine whose outputs a test writes."""

    receivers: dict[str, Callable[[EngineOutput], None]] = field(default_factory=dict)
    abandoned: list[str] = field(default_factory=list)

    def submit(self, add: AdmittedAdd, receive: Callable[[EngineOutput], None]) -> None:
        self.receivers[add.request_id] = receive

    def abandon(self, request_id: str) -> None:
        self.abandoned.append(request_id)

    def finish(self, request_id: str, choice: int, num_tokens: int) -> None: ...

    def send(self, add: AdmittedAdd, *token_ids: int, choice: int = 0, **members: Any) -> None:
        tokens = tuple(map(SampledToken, token_ids))
        self.receivers[add.request_id](EngineOutput(add.request_id, choice, tokens, **members))


class Setup:
    def __init__(self, adds: Sequence[AdmittedAdd], max_lag: float = 60.0, **options: Any) -> None:
        self.client = HandFedClient()
        self.limit = SequenceLimit(8)
        self.queue = EventQueue(
            cast(EngineClient, self.client),
            adds,
            lambda add: Decoder(add, RENDERER, TextOptions(), self.client.finish),
            self.limit.acquire(len(adds)),
            max_lag,
            **options,
        )

    async def read(self) -> list[tuple[int, Event]]:
        events = []
        while (item := await self.queue.next()) is not None:
            events.append(item)
        return events


def admitted(**options: Any) -> AdmittedAdd:
    return AdmittedAdd(add_of(**options))


async def test_events_are_in_order_and_the_end_releases_the_ticket() -> None:
    adds = [admitted(), admitted()]
    setup = Setup(adds)
    with setup.queue:
        for add in adds:
            setup.client.send(add)
        await setup.queue.accepted()
        setup.client.send(adds[1], num_computed_prompt_tokens=3)
        setup.client.send(adds[0], 5)
        setup.client.send(adds[0], final=LENGTH)
        assert setup.limit.num_held == 2
        setup.client.send(adds[1], final=LENGTH)
        assert setup.limit.num_held == 0, "the engine has ended, whether or not the client has read that"
        events = await setup.read()
    assert [(prompt, type(event)) for prompt, event in events] == [
        (1, Progress),
        (0, ChoiceDelta),
        (1, ChoiceDelta),
    ]


async def test_the_last_delta_joins_the_one_before_it_if_that_is_still_unread() -> None:
    add = admitted(num_choices=2)
    setup = Setup([add])
    with setup.queue:
        setup.client.send(add, 5)
        setup.client.send(add, final=LENGTH)
        setup.client.send(add, 6, choice=1)
        unread = [await setup.queue.next(), await setup.queue.next()]
        setup.client.send(add, choice=1, final=LENGTH)
        events = [item[1] for item in unread if item] + [event for _, event in await setup.read()]
    finals = [event.final is not None for event in events if isinstance(event, ChoiceDelta)]
    assert finals == [True, False, True]


async def test_a_failure_is_raised_after_earlier_events_and_ends_other_prompts() -> None:
    adds = [admitted(), admitted()]
    setup = Setup(adds)
    with setup.queue:
        for add in adds:
            setup.client.send(add)
        await setup.queue.accepted()
        setup.client.send(adds[0], 5)
        setup.client.send(adds[1], final=ERROR)
        assert setup.client.abandoned == [add.request_id for add in adds]
        assert await setup.queue.next() is not None
        with pytest.raises(GenerationError, match="lost"):
            await setup.queue.next()


async def test_a_failure_before_acceptance_is_raised_there() -> None:
    adds = [admitted(), admitted()]
    setup = Setup(adds)
    with setup.queue:
        setup.client.send(adds[0])
        setup.client.send(adds[1], final=ERROR)
        with pytest.raises(GenerationError, match="lost"):
            await setup.queue.accepted()


async def test_a_reader_that_lags_too_far_behind_loses_its_request() -> None:
    add = admitted()
    setup = Setup([add], max_lag=0.0)
    with setup.queue:
        setup.client.send(add, 5)
        setup.client.send(add, 6)
        with pytest.raises(SlowReaderError) as error:
            await setup.queue.next()
        assert setup.client.abandoned == [add.request_id]
        assert setup.limit.num_held == 0
    failure = as_api_error(error.value)
    assert (failure.status, failure.code) == (408, "slow_reader")


async def test_prompts_beyond_the_limit_in_flight_are_submitted_as_others_end() -> None:
    adds = [admitted() for _ in range(5)]
    setup = Setup(adds, max_in_flight=2)
    with setup.queue:
        for index, add in enumerate(adds):
            assert len(setup.client.receivers) == min(index + 2, 5)
            setup.client.send(add, final=LENGTH)
        await setup.queue.accepted()
        assert [prompt for prompt, _ in await setup.read()] == [0, 1, 2, 3, 4]


async def test_leaving_abandons_only_unfinished_requests() -> None:
    adds = [admitted() for _ in range(4)]
    setup = Setup(adds, max_in_flight=2)
    with setup.queue:
        setup.client.send(adds[0], final=LENGTH)
    assert setup.client.abandoned == [adds[1].request_id, adds[2].request_id]


async def test_waiting_ends_at_its_deadline() -> None:
    setup = Setup([admitted()])
    with setup.queue, pytest.raises(TimeoutError):
        await setup.queue.next(deadline=0.0)
