"""The limit on the bytes of all files together on the disk."""

from collections.abc import Callable

from server.http.errors import ApiError


class Quota:
    """The bytes in use, out of `limit`: what `sources` count on the disk, and uploads in progress."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.sources: list[Callable[[], int]] = []
        self._num_pending = 0

    @property
    def num_used(self) -> int:
        return self._num_pending + sum(source() for source in self.sources)

    @property
    def is_full(self) -> bool:
        return self.num_used >= self._limit

    def take(self, num_bytes: int) -> None:
        """Use `num_bytes` more bytes for an upload. Raises `ApiError` if the limit does not allow them."""
        if self.num_used + num_bytes > self._limit:
            message = (
                f"The server's {self._limit} bytes for files are used up. "
                "Please delete files that you no longer need."
            )
            raise ApiError(413, "storage_limit_exceeded", message, param="file")
        self._num_pending += num_bytes

    def release(self, num_bytes: int) -> None:
        """End an upload of `num_bytes` bytes: a source counts its file, or it is gone."""
        self._num_pending -= num_bytes
