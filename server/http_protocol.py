"""uvicorn's HTTP/1.1 protocol with a bound on what stands before a body, which neither uvicorn nor the parser sets."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError
from server.jsontext import ascii_json

MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers; what is read in one go may exceed it once


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to a request whose head does not end, and closes the connection."""

    _is_in_head = True
    _num_head_bytes = 0

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse()

    def _refuse(self) -> None:
        body = ascii_json(ApiError(431, "headers_too_large", f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.").body())
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
