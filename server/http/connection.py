"""The HTTP/1.1 protocol of the server's connections."""

from server.http.bounded_protocol import BoundedHttpProtocol
from server.options.settings import ConnectionLimits


def protocol_with(connection_limits: ConnectionLimits) -> type[BoundedHttpProtocol]:
    """Return the protocol with these limits, for `uvicorn.Config.http`."""

    class LimitedHttpProtocol(BoundedHttpProtocol):
        limits = connection_limits

    return LimitedHttpProtocol
