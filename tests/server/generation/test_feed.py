"""What happens to events that nobody takes."""

from collections.abc import AsyncGenerator
from typing import cast

import pytest

from server.engine.tickets import Places
from server.generation.failures import as_api_error
from server.generation.feed import EventFeed, SlowReaderError
from server.generation.output import Event, Generation, Progress


async def test_a_reader_that_falls_too_far_behind_ends_its_request() -> None:
    """What it left lying is thrown away, the rest is not made, and the place is free."""
    num_made, is_closed, places = 0, False, Places(1)

    async def made() -> AsyncGenerator[Event, None]:
        nonlocal num_made, is_closed
        try:
            while True:
                num_made += 1
                yield Progress(num_made)
        finally:
            is_closed = True

    async with EventFeed([cast(Generation, made())], places.take(1), max_lag=0.0) as feed:
        with pytest.raises(SlowReaderError) as error:
            await feed.next()
        assert is_closed
        assert num_made < 1000
        assert places.num_taken == 0
    assert (as_api_error(error.value).status, as_api_error(error.value).code) == (408, "slow_reader")
