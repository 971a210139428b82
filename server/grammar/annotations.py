"""The keywords of JSON schemas that no grammar can enforce, where they are in a schema.

The library reports their names. Without `strict` they are annotations: the schema is followed without them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

# Keywords whose value has data or names, and no schema.
_DATA: Final = frozenset({"const", "default", "enum", "examples", "required"})
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


@dataclass(frozen=True, slots=True)
class NamedSchema:
    """A schema of a request, with the parameter that it comes from."""

    where: str
    schema: Mapping[str, Any]
    is_strict: bool


def unenforced_keywords(warnings: Iterable[str]) -> frozenset[str]:
    """Return the keywords that the library's warnings name. An unknown format is always an annotation."""
    found = set[str]()
    for warning in warnings:
        if unimplemented := re.match(r"Unimplemented keys: \[(.*)\]", warning):
            found |= set(re.findall(r'"([^"]+)"', unimplemented[1]))
        elif "oneOf" in warning:
            found.add("oneOf")
    return frozenset(found)


def occurrences(schema: Mapping[str, Any], keywords: frozenset[str], path: str = "") -> Iterator[str]:
    """Return the paths of keywords in a schema, without those that demand nothing."""
    for key, value in schema.items():
        here = f"{path}.{key}" if path else key
        if key in keywords and not (key == "uniqueItems" and value is False):
            yield here
        if key in _DATA:
            continue
        if key in _NAMED and isinstance(value, Mapping):
            for name, item in value.items():
                if isinstance(item, Mapping):
                    yield from occurrences(item, keywords, f"{here}.{name}")
        elif isinstance(value, Mapping):
            yield from occurrences(value, keywords, here)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from occurrences(item, keywords, f"{here}[{index}]")
