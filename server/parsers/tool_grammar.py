"""The grammar of an answer with tool calls: the family's format around arguments that satisfy a schema."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from server.grammar.structure import JSON_OPTIONS, StructureLimits, check_schema, schema_text
from server.parsers.tool_format import ToolFormat

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """A Lark grammar of tool calls.

    `functions` are names and the schemas of their parameters. `special_tokens` are the ids of those in the
    format's markers, by text. With `is_parallel`, several calls are allowed. With `is_optional`, an answer
    may have text too.
    """

    tool_format: ToolFormat
    functions: tuple[tuple[str, Mapping[str, Any]], ...]
    is_parallel: bool
    is_optional: bool = False
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    def lark(self, limits: StructureLimits) -> str:
        """Return the grammar. Raises `StructureError`."""
        indices = range(len(self.functions))
        rules = [
            f"{rule}: {' | '.join(f'{rule}_{index}' for index in indices)}" for rule in ("call", "opened")
        ]
        opening = self.tool_format.opening
        for index, (name, schema) in enumerate(self.functions):
            check_schema(schema, limits)
            before, after = self.tool_format.around(name)
            end = f"arguments_{index} {self._literal(after)}"
            rules.append(f"call_{index}: {self._literal(before)} {end}")
            rules.append(f"opened_{index}: {self._literal(before.removeprefix(opening))} {end}")
            rules.append(
                f"arguments_{index}: %json {schema_text({**schema, 'x-guidance': JSON_OPTIONS}, limits)}"
            )
        return "\n".join([*self._start(), *rules])

    def _start(self) -> list[str]:
        shape = self.tool_format
        more = f"({self._literal(shape.between)} call)*" if self.is_parallel else ""
        calls = f"{self._literal(shape.prefix)} call {more} {self._literal(shape.suffix)}"
        if not self.is_optional:
            return [f"start: {calls}"]
        if not shape.opening:
            return [f"start: TEXT | {calls}", f"TEXT: /[^{re.escape(shape.starts)} \\n](?s:.*)/"]
        rest = f"{self._literal(shape.prefix.removeprefix(shape.opening))} call" if shape.prefix else "opened"
        opening = self._literal(shape.opening)
        head = f"head: TEXT {opening}" if opening.startswith("<[") else f"head[lazy]: TEXT {opening}"
        repeated = "*" if self.is_parallel else "?"
        return [
            f"start: (head {rest} {more} {self._literal(shape.suffix)}){repeated} tail",
            "tail: TEXT",
            "TEXT: /(?s:.*)/",
            head,
        ]

    def _literal(self, text: str) -> str:
        return literal(text, self.special_tokens)


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return text as a Lark expression, with special tokens by their ids."""
    parts = re.split("(" + "|".join(map(re.escape, special_tokens)) + ")", text) if special_tokens else [text]
    return " ".join(
        f"<[{special_tokens[part]}]>" if part in special_tokens else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )
