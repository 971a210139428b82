"""Connections beyond the limit, counted and logged."""

import logging
from typing import Final, Protocol

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
