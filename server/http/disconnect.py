"""Ends the work for an answer when the client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.types import Receive

_Result = TypeVar("_Result")


async def run_until_disconnect(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work` to its end, or cancel it as soon as the client disconnects. Raises what `work` raises."""
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        disconnected.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, _Result]) -> _Result:
    """Return what `work` returns, or cancel it as soon as the client disconnects.

    No client reads the answer then.
    """
    results: list[_Result] = []

    async def keep_result() -> None:
        results.append(await work)

    await run_until_disconnect(receive, keep_result())
    if not results:
        raise HTTPException(499, "The client disconnected.")
    return results[0]


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
