"""How log lines are written: as text or as JSON, one line each, with the id of the request that they are about.

A line's fields are given as `extra=fields(name=value, …)`. Whatever a client sent is escaped, so that it cannot make lines of its own.
"""

import enum
import json
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

_FIELDS: Final = "snapserve_fields"
request_id: Final[ContextVar[str | None]] = ContextVar(
    "request_id", default=None
)  # of the request that is being answered


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the `extra` of a log call; what is None is left out."""
    return {_FIELDS: {name: value for name, value in values.items() if value is not None}}


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Write the log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """Lines of JSON: time (UTC), level, logger, message, request_id, the fields, and where there is one, the exception."""

    def format(self, record: logging.LogRecord) -> str:
        seconds, milliseconds = (
            time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)),
            int(record.msecs),
        )
        line: dict[str, object] = {
            "time": f"{seconds}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= {"message": record.getMessage(), **_fields_of(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Lines for people: the message, and the fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (as in the base class)
        return " ".join(
            [
                super().formatMessage(record),
                *(f"{name}={_plain(value)}" for name, value in _fields_of(record).items()),
            ]
        )


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    own = {} if request_id.get() is None else {"request_id": request_id.get()}
    return own | getattr(record, _FIELDS, {})


def _plain(value: object) -> str:
    """Return a value as one word if it is one, and as JSON otherwise."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
