"""The options about connections: how long they may take for what, and how many there may be."""

from collections.abc import Mapping
from typing import Any

from server.options.option import Option, OptionGroup, integer, some_seconds
from server.options.settings import ConnectionLimits

_DEFAULT = ConnectionLimits()

CONNECTIONS = OptionGroup(
    "Connections",
    (
        Option(
            "max-connections",
            integer(1),
            _DEFAULT.max_connections,
            "Connections at once, below `ulimit -n`; more get a 503.",
            "N",
        ),
        Option(
            "read-timeout",
            some_seconds,
            _DEFAULT.read_timeout,
            "Time for a request's head to arrive, and for each 64 KiB of its body; then it gets a 408.",
            "SECONDS",
        ),
        Option(
            "write-timeout",
            some_seconds,
            _DEFAULT.write_timeout,
            "Time after which a client that does not read is cut off, and how far it may lag behind its stream.",
            "SECONDS",
        ),
        Option(
            "idle-timeout",
            some_seconds,
            _DEFAULT.idle_timeout,
            "Time after which an unused connection is closed.",
            "SECONDS",
        ),
    ),
)


def connection_limits_of(values: Mapping[str, Any]) -> ConnectionLimits:
    """Return what the options of the group say."""
    return ConnectionLimits(**{option.key: values[option.key] for option in CONNECTIONS.options})
