"""The limit on the bytes of all files together on the disk."""

from server.http.errors import ApiError


class Quota:
    """The number of used bytes, out of `limit`. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_used = 0

    @property
    def is_full(self) -> bool:
        return self.num_used >= self._limit

    def take(self, num_bytes: int) -> None:
        """Use `num_bytes` more bytes. Raises `ApiError` if the limit does not allow them."""
        if self.num_used + num_bytes > self._limit:
            message = (
                f"The server's {self._limit} bytes for files are used up. "
                "Please delete files that you no longer need."
            )
            raise ApiError(413, "storage_limit_exceeded", message, param="file")
        self.num_used += num_bytes

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more bytes, or fewer if negative. Does not check the limit."""
        self.num_used += num_bytes
