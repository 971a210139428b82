"""Parses the multipart form of an upload as it arrives: its short fields, and the content of its one file."""

from typing import Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from server.http.errors import ApiError, invalid_value

FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
MAX_FIELD_BYTES: Final = 256
MAX_HEADERS: Final = 8  # headers of one part
MAX_HEADER_BYTES: Final = 2048


class UploadForm:
    """An incremental parser of the form. It keeps the fields, but none of the file's content.

    The constructor and `feed` raise `ApiError` for a body that is no valid form.
    """

    def __init__(self, content_type: str) -> None:
        media_type, options = parse_options_header(content_type)
        if media_type != b"multipart/form-data" or not options.get(b"boundary"):
            raise invalid_value("The request's body must be multipart/form-data with a boundary.", None)
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._content = bytearray()
        self._part: str | None = None  # the name of the current part
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        callbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._name_part,
            "on_part_data": self._take,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                callbacks,  # type: ignore[arg-type]  # the library defines its type only under TYPE_CHECKING
                max_header_count=MAX_HEADERS,
                max_header_size=MAX_HEADER_BYTES,
            )
        except FormParserError as error:
            raise _malformed(error) from error

    def feed(self, piece: bytes) -> bytes:
        """Parse a piece of the body, and return the file's content in it."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _malformed(error) from error
        content = bytes(self._content)
        self._content.clear()
        return content

    def _begin_part(self) -> None:
        self._part = None
        self._disposition = b""

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        name, filename = (_text(options.get(key, b"")) for key in (b"name", b"filename"))
        if name in self.fields or (name == "file" and self.filename is not None):
            raise invalid_value(f"Duplicate parameter: '{name}'.", name)
        if name == "file":
            if b"filename" not in options:
                raise invalid_value("'file' must be a file: its part needs a filename.", "file")
            self.filename = filename
        elif name in FIELDS:
            self.fields[name] = b""
        else:
            raise invalid_value(f"Unknown parameter: '{name[:128]}'.", name[:128], code="unknown_parameter")
        self._part = name

    def _take(self, data: bytes, start: int, end: int) -> None:
        assert self._part is not None, "a part has data after it has a name"
        if self._part == "file":
            self._content += data[start:end]
            return
        self.fields[self._part] += data[start:end]
        if len(self.fields[self._part]) > MAX_FIELD_BYTES:
            raise invalid_value(f"'{self._part}' must have at most {MAX_FIELD_BYTES} bytes.", self._part)

    def _end(self) -> None:
        self.is_complete = True


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise invalid_value("The names of the form's parts must be UTF-8.", None) from error


def _malformed(error: FormParserError) -> ApiError:
    return invalid_value(
        f"The request's body is not a valid multipart form: {error}.", None, code="invalid_multipart"
    )
