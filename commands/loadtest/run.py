"""One run of a load against one server.

Requests are sent at their arrival times, under a limit of concurrency, until all have ended or time is up.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from commands.loadtest.answer import Failure
from commands.loadtest.prompts import Prompt
from commands.loadtest.recording import Recording
from commands.loadtest.target import Outcome, Target, read_outcome

Progress: TypeAlias = Callable[[bool], None]
"""Called after each request with whether it succeeded."""


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of every request, in the order of the prompts, and the seconds that the run took."""

    outcomes: tuple[Outcome, ...]
    duration: float


async def run_load(
    target: Target,
    prompts: Sequence[Prompt],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    time_limit: float,
    progress: Progress,
) -> Run:
    """Send `prompts` at the times `arrivals`, in seconds from now.

    A latency begins when the request is sent: the wait for a free place under `max_concurrency` does not
    count.
    """
    limit = asyncio.Semaphore(max_concurrency or len(prompts))
    late = Failure("time limit", f"unfinished after {time_limit:g} s")
    recordings: list[Recording | Failure] = [late] * len(prompts)

    async def send(index: int) -> None:
        async with limit:
            recording = await target.send(prompts[index])
        recordings[index] = recording
        progress(not isinstance(recording, Failure) and recording.is_ok)

    start = time.perf_counter()
    try:
        async with asyncio.timeout(time_limit), asyncio.TaskGroup() as group:
            for index, arrival in enumerate(arrivals):
                if (wait := start + arrival - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(send(index))
    except TimeoutError:
        pass  # requests without a recording keep the failure `late`
    duration = time.perf_counter() - start
    return Run(tuple(read_outcome(recording) for recording in recordings), duration)
