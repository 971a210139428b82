"""How a request was answered, for those that tell of it when it has ended. It knows nothing of what was asked."""

from typing import Final

from starlette.types import Message, Scope, Send

_KEY: Final = "snapserve.refused_with"
_GONE: Final = 499  # before it was answered


class SentStatus:
    """Wraps `send` and remembers the status that went by."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._sent: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._sent = message["status"]
        await self._send(message)

    @property
    def value(self) -> int:
        """The status that the application or, in its stead, the HTTP protocol answered; 499 if the client had gone before."""
        if self._sent is not None:
            return self._sent
        refused_with: int = self._scope.get(_KEY, _GONE)
        return refused_with


def note_refusal(scope: Scope, status: int) -> None:
    """The HTTP protocol has ended a request with an answer of its own."""
    scope[_KEY] = status
