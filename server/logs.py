"""The format of log lines: text or JSON, one line for each record, with the id of the current request.

A log call passes its fields as `extra=fields(name=value, …)`. Text from clients is escaped, so that it cannot
forge log lines.
"""

import enum
import json
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

_FIELDS: Final = "snapserve_fields"
# The id of the request that the current task answers.
request_id: Final[ContextVar[str | None]] = ContextVar("request_id", default=None)


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the `extra` of a log call. Values that are None are left out."""
    return {_FIELDS: {name: value for name, value in values.items() if value is not None}}


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Write log records from `level` on to standard error. Replaces earlier handlers."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON line: time (UTC), level, logger, message, request_id, fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record as readable text: the message, and the fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (as in the base class)
        parts = [f"{name}={_quoted(value)}" for name, value in _fields_of(record).items()]
        return " ".join([super().formatMessage(record), *parts])


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    current_id = request_id.get()
    request_fields = {} if current_id is None else {"request_id": current_id}
    return request_fields | getattr(record, _FIELDS, {})


def _quoted(value: object) -> str:
    """Return a value as it is if it is one printable word, and as a JSON string otherwise."""
    text = str(value)
    is_word = text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if is_word else json.dumps(text)
