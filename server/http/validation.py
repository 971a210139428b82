"""What is wrong with a request's body or query, told as OpenAI tells it: one message, the parameter's path, a code."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from server.http.errors import ApiError, invalid_value, unsupported_parameter


def invalid_request(error: RequestValidationError) -> ApiError:
    """Return the answer to what is not a valid request: about the error that lies deepest, which says most."""
    details = error.errors()
    paths = [_path(detail, error.body) for detail in details]
    # Of an option with several types, the arm whose type was right but not its value says more than the others.
    deepest = max(
        range(len(paths)), key=lambda index: (len(paths[index]), not details[index]["type"].endswith("_type"))
    )
    kind, message, path = str(details[deepest]["type"]), str(details[deepest]["msg"]), _joined(paths[deepest])
    if kind == "json_invalid":
        return invalid_value(
            f"The request's body is not valid JSON: {details[deepest]['ctx']['error']}.",
            None,
            code="invalid_json",
        )
    if not path and kind == "invalid_value":
        return invalid_value(f"The request's body {message}.", None)
    if not path:
        return invalid_value(
            "The request's body must be a JSON object of the fields that this route takes.",
            None,
            code="invalid_type",
        )
    if kind == "unsupported_parameter":
        return unsupported_parameter(path)
    if kind == "extra_forbidden":
        return invalid_value(f"Unknown parameter: '{path}'.", path, code="unknown_parameter")
    if kind in ("missing", "union_tag_not_found"):
        return invalid_value(
            f"Missing required parameter: '{path}'.", path, code="missing_required_parameter"
        )
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return invalid_value(f"Invalid value for '{path}': {message[0].lower()}{message[1:]}.", path, code=code)


def _loc(detail: Mapping[str, Any]) -> Sequence[str | int]:
    """Return the steps to an error within the body; to the field that says which of several kinds an object is, if that is at fault."""
    loc: tuple[str | int, ...] = detail["loc"][1:]
    discriminator = detail.get("ctx", {}).get("discriminator")
    return loc if discriminator is None else (*loc, discriminator.strip("'"))


def _path(detail: Mapping[str, Any], body: Any) -> list[str | int]:
    """Return the steps to an error that lead through the body: pydantic also names the arms of unions there."""
    loc, is_missing = _loc(detail), detail["type"] in ("missing", "union_tag_not_found")
    if detail["loc"][0] == "query":
        return list(loc)
    path: list[str | int] = []
    for number, step in enumerate(loc):
        if _has(body, step):
            body = body[step]
            path.append(step)
        elif is_missing and number == len(loc) - 1:
            path.append(step)
    return path


def _has(value: object, step: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(step, int) and step < len(value)
    return isinstance(value, Mapping) and step in value


def _joined(path: Sequence[str | int]) -> str:
    """Return a path as OpenAI writes it: `messages[0].content`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")[
        :256
    ]
