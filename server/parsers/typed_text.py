"""The type of a value that a model writes without quotes, by the schema of its parameter."""

import json
from collections.abc import Mapping
from typing import Any, Final

from server.parsers.literals import QUOTES, json_of

_MAX_DEPTH: Final = 8  # of references and alternatives
_TYPES: Final = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows; none if it does not say. `root` has the definitions."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    schema = resolved(schema, root)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_TYPES.get(type(value), "null") for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            several = [types_of(each, root, depth + 1) for each in schema[key]]
            return frozenset().union(*several) if all(several) else frozenset()
    if isinstance(schema.get("allOf"), list) and schema["allOf"]:
        return types_of(schema["allOf"][0], root, depth + 1)
    return frozenset()


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition that a schema refers to, or the schema."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for name in reference[2:].split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            break
        schema = target
    return schema


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters by their names."""
    properties = resolved(schema, schema).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def typed(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: a string, unless the text is a literal of another allowed type."""
    if types != {"string"}:
        literal = json_of(text, QUOTES)
        if literal is not None and (not types or _type_of(literal) & types):
            return literal
    return json.dumps(text, ensure_ascii=False)


def _type_of(text: str) -> frozenset[str]:
    value = json.loads(text)
    kind = _TYPES.get(type(value), "null")
    if kind == "integer" or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    return frozenset({kind})
