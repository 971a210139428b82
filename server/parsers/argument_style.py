"""What the ways of writing a call's arguments have in common: how they are read, written and enforced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from server.grammar.structure import StructureError
from server.parsers.typed_text import properties_of, resolved, types_of

# Keywords of a text that is written without quotes. No grammar of such a text enforces them.
_TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength")


class CallReader(Protocol):
    """Reads one call, character by character, until it `is_complete`.

    `is_in_text` says that the last character is inside a string, where markers are ordinary text.
    """

    name: str | None

    @property
    def is_complete(self) -> bool: ...

    @property
    def is_in_text(self) -> bool: ...

    def feed(self, char: str) -> None: ...

    def take_arguments(self) -> str:
        """Return the JSON of the arguments that was read since the last call."""
        ...

    def repair(self) -> None:
        """Complete the call: its end marker came before its last brackets."""
        ...


class ArgumentStyle(Protocol):
    """A way of writing arguments that is not one JSON object. `begins` are characters that may begin them."""

    @property
    def begins(self) -> str: ...

    @property
    def markers(self) -> str:
        """All text around values, which may contain special tokens."""
        ...

    def reader(self, schema: Mapping[str, Any]) -> CallReader:
        """Return a reader of one call's arguments, which satisfy a schema."""
        ...

    def write(self, arguments: Mapping[str, Any]) -> str: ...

    def lark(self, rule: str, parameters: "Parameters", literal: Callable[[str], str]) -> list[str]:
        """Return the rules of the arguments, the first one named `rule`. Raises `StructureError`."""
        ...


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function, to be enforced. `json_rule` returns the Lark of a value in JSON."""

    schema: Mapping[str, Any]
    is_strict: bool
    json_rule: Callable[[Mapping[str, Any]], str]

    def each(self) -> list[tuple[str, Mapping[str, Any], bool]]:
        """Return names, schemas, and whether they are required. Raises `StructureError`."""
        root = resolved(self.schema, self.schema)
        if any(key in root for key in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties")):
            raise StructureError("this model's tool format can enforce an object with 'properties' alone")
        properties = properties_of(self.schema)
        required = root.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise StructureError("'required' must be a list of names")
        if not all(name in properties for name in required):
            raise StructureError("a required parameter is not among its 'properties'")
        return [
            (name, value if isinstance(value, Mapping) else {}, name in required)
            for name, value in properties.items()
        ]

    def is_text(self, value: Mapping[str, Any]) -> bool:
        return types_of(value, self.schema) == {"string"}

    def texts(self, name: str, value: Mapping[str, Any]) -> list[str] | None:
        """Return the texts that a parameter may be; None for any. Raises `StructureError`."""
        value = resolved(value, self.schema)
        texts = value.get("enum", [value["const"]] if "const" in value else None)
        if isinstance(texts, list):
            own = [text for text in texts if isinstance(text, str)]
            if not own:
                raise StructureError(f"no value of '{name}' is a string, as its type demands")
            return own
        wrong = next((key for key in _TEXT_KEYWORDS if key in value), None)
        if self.is_strict and wrong is not None:
            raise StructureError(
                f"this model writes texts without quotes, so '{wrong}' of '{name}' cannot be enforced"
            )
        return None

    def value(self, value: Mapping[str, Any]) -> str:
        """Return the Lark of a value in JSON."""
        definitions = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        return self.json_rule({**value, **definitions})
