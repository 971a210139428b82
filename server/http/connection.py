"""Which HTTP/1.1 protocol connections use: ours with limits, or uvicorn's own where its internals have
changed.
"""

import asyncio
import logging
from typing import Final, Literal, Protocol

import uvicorn

from server.options.settings import ConnectionLimits

logger = logging.getLogger(__name__)

LOG_INTERVAL: Final = 10.0  # seconds between two lines about refused connections


class ConnectionObserver(Protocol):
    def refused_connection(self) -> None:
        """A connection was beyond the limit."""
        ...


class Refusals:
    """Counts refused connections, and logs their number from time to time."""

    def __init__(self, observer: ConnectionObserver, limit: int) -> None:
        self._observer = observer
        self._limit = limit
        self._num_unlogged = 0
        self._next_log = 0.0

    def add(self, now: float) -> None:
        """Count a refusal at `now`, by the event loop's clock."""
        self._observer.refused_connection()
        self._num_unlogged += 1
        if now >= self._next_log:
            logger.warning(
                "refused %d connections beyond --max-connections %d", self._num_unlogged, self._limit
            )
            self._num_unlogged, self._next_log = 0, now + LOG_INTERVAL


def protocol_with(
    connection_limits: ConnectionLimits, observer: ConnectionObserver
) -> type[asyncio.Protocol] | Literal["auto"]:
    """Return the protocol with these limits, for `uvicorn.Config.http`.

    It needs internals of uvicorn. Without them, the server starts with uvicorn's own protocol and logs a
    warning.
    """
    try:
        from server.http.bounded_protocol import BoundedHttpProtocol
    except ImportError as error:
        logger.warning(
            "uvicorn %s lacks internals that the connection limits need (%s): --max-connections, "
            "--read-timeout, --write-timeout and --idle-timeout do not limit connections, and request heads "
            "and pipelined requests have no limit",
            uvicorn.__version__,
            error,
        )
        return "auto"

    class LimitedHttpProtocol(BoundedHttpProtocol):
        limits = connection_limits
        refusals = Refusals(observer, connection_limits.max_connections)

    return LimitedHttpProtocol
