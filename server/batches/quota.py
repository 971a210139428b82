"""How many bytes all files together may have on the disk."""

from server.http.errors import ApiError


class Quota:
    """Bytes taken, of a limit. Used on one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_taken = 0

    @property
    def is_full(self) -> bool:
        return self.num_taken >= self._limit

    def take(self, num_bytes: int) -> None:
        """Take so many bytes. Raises `ApiError` when they are not there."""
        if self.num_taken + num_bytes > self._limit:
            message = f"The server's {self._limit} bytes for files are taken. Please delete files that you do not need any more."
            raise ApiError(413, "storage_limit_exceeded", message, param="file")
        self.num_taken += num_bytes

    def add(self, num_bytes: int) -> None:
        """Take them or, if negative, give them back, whatever the limit."""
        self.num_taken += num_bytes
