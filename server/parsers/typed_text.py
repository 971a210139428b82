"""The type of a value that a model writes without quotes, by the schema of its parameter."""

import json
from collections.abc import Mapping
from typing import Any, Final

from server.parsers.literals import QUOTES, json_of

_MAX_DEPTH: Final = 8  # of references
_MAX_SCHEMAS: Final = 64  # alternatives of one parameter; with more, its type counts as unknown
_TYPES: Final = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows; none if it does not say. `root` has the definitions."""
    found = set[str]()
    seen = set[int]()  # alternatives may refer to each other
    unseen = [schema]
    while unseen:
        item = unseen.pop()
        own = resolved(item, root) if isinstance(item, Mapping) else None
        if own is None or len(seen) > _MAX_SCHEMAS:
            return frozenset()
        if id(own) in seen:
            continue
        seen.add(id(own))
        values = own.get("enum", [own["const"]] if "const" in own else None)
        several = next((own[key] for key in ("anyOf", "oneOf") if isinstance(own.get(key), list)), None)
        if isinstance(own.get("type"), str | list):
            kinds = [own["type"]] if isinstance(own["type"], str) else own["type"]
            found |= {kind for kind in kinds if isinstance(kind, str)}
        elif isinstance(values, list):
            found |= {_TYPES.get(type(value), "null") for value in values}
        elif several is not None:
            unseen += several
        elif isinstance(own.get("allOf"), list) and own["allOf"]:
            unseen.append(own["allOf"][0])
        else:
            return frozenset()
    return frozenset(found)


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
