"""Validation errors of a body or query in OpenAI's form: one message, the parameter's path, a code."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fastapi.exceptions import RequestValidationError

from server.http.errors import ApiError, invalid_value, unsupported_parameter

Steps: TypeAlias = Sequence[str | int]  # keys of objects and indices of lists

MAX_MESSAGE = 512  # characters of an error's text

_MISSING = ("missing", "union_tag_not_found")  # pydantic's types of errors about an absent field


def invalid_request(error: RequestValidationError) -> ApiError:
    """Return the error for the client.

    Of several, it is the one with the deepest path, which is the most specific.
    """
    detail, steps = _most_specific(error)
    kind = str(detail["type"])
    message = str(detail["msg"])[:MAX_MESSAGE]  # some repeat the value
    path = _joined(steps)
    if kind == "json_invalid":
        cause = detail["ctx"]["error"]
        return invalid_value(f"The request's body is not valid JSON: {cause}.", None, code="invalid_json")
    if not path and kind == "invalid_value":
        return invalid_value(f"The request's body {message}.", None)
    if not path:
        message = "The request's body must be a JSON object of the fields that this route takes."
        return invalid_value(message, None, code="invalid_type")
    if kind == "unsupported_parameter":
        return unsupported_parameter(path, message)
    if kind == "extra_forbidden":
        return invalid_value(f"Unknown parameter: '{path}'.", path, code="unknown_parameter")
    if kind in _MISSING:
        return invalid_value(
            f"Missing required parameter: '{path}'.", path, code="missing_required_parameter"
        )
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return invalid_value(f"Invalid value for '{path}': {message[0].lower()}{message[1:]}.", path, code=code)


def _most_specific(error: RequestValidationError) -> tuple[Mapping[str, Any], Steps]:
    """Return the error with the longest path, and its path."""
    located = [(detail, _path(detail, error.body)) for detail in error.errors()]
    # A field of several types has one error a type. The one whose type matched, but not its value, says the
    # most.
    return max(located, key=lambda item: (len(item[1]), not item[0]["type"].endswith("_type")))


def _loc(detail: Mapping[str, Any]) -> Steps:
    """Return the steps of an error's location.

    An error about a union's discriminator is located at that field.
    """
    loc: tuple[str | int, ...] = detail["loc"][1:]
    discriminator = detail.get("ctx", {}).get("discriminator")
    return loc if discriminator is None else (*loc, discriminator.strip("'"))


def _path(detail: Mapping[str, Any], body: Any) -> Steps:
    """Return the steps of an error's location that exist in the body.

    Pydantic also inserts the names of a union's types, which are not in the body.
    """
    loc = _loc(detail)
    if detail["loc"][0] == "query":
        return loc
    is_missing = detail["type"] in _MISSING
    path: list[str | int] = []
    for index, step in enumerate(loc):
        if _has(body, step):
            body = body[step]
            path.append(step)
        elif is_missing and index == len(loc) - 1:
            path.append(step)
    return path


def _has(value: object, step: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(step, int) and step < len(value)
    return isinstance(value, Mapping) and step in value


def _joined(path: Steps) -> str:
    """Return a path in OpenAI's notation: `messages[0].content`."""
    parts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join(parts).removeprefix(".")[:256]
