"""A `snapserve serve` process on a free port. The evaluation measures the server that users run."""

import asyncio
import os
import re
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from backends.options import OptionGroup
from commands.eval.errors import EvalError

_READY = re.compile(rb"ready at (\S+) after")
_END_LIMIT = 20.0  # seconds


@asynccontextmanager
async def engine(options: Sequence[str]) -> AsyncIterator[str]:
    """Start a server with these options, yield its URL when it is ready, and end it.

    Raises `EvalError` for a server that does not become ready.
    """
    # Without the variables that configure a server, results are the same on every machine.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(OptionGroup.prefix)
    }
    with tempfile.TemporaryFile() as log:
        serve = (sys.executable, "-P", "-m", "server", "serve", "--port", "0", "--log-level", "warning")
        process = await asyncio.create_subprocess_exec(
            *serve, *options, stdout=PIPE, stderr=log, env=environment
        )
        try:
            url = await _ready_url(process)
            if url is None:
                log.seek(0)
                errors = log.read().decode(errors="replace").strip()
                raise EvalError(f"the engine did not start with {' '.join(options)}: {errors[-2000:]}")
            yield url
        finally:
            await _end(process)


async def _ready_url(process: Process) -> str | None:
    assert process.stdout is not None
    async for line in process.stdout:
        if match := _READY.search(line):
            return match[1].decode()
    return None


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):  # it may have ended by itself
        process.terminate()
    try:
        async with asyncio.timeout(_END_LIMIT):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
