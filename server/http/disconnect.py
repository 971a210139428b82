"""A race between an answer in the making and the client's going away."""

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


async def run_until_disconnect(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work` to its end, or cancel it as soon as the client has gone. Raises what `work` raises."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
