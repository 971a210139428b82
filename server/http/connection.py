"""Which HTTP/1.1 protocol connections use: ours with limits, or uvicorn's own where its internals have
changed.
"""

import asyncio
import logging
from typing import Literal

import uvicorn

from server.http.refusals import ConnectionObserver, Refusals
from server.options.settings import ConnectionLimits

logger = logging.getLogger(__name__)


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
