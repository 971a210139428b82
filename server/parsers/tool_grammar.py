"""The grammar of an answer with tool calls: the family's format around arguments that satisfy a schema."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.grammar.annotations import NamedSchema
from server.grammar.structure import JSON_OPTIONS, StructureError, StructureLimits, check_schema, schema_text
from server.parsers.argument_style import Parameters
from server.parsers.tool_format import ToolFormat

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """A Lark grammar of tool calls.

    `functions` are names and the schemas of their parameters. `special_tokens` are the ids of those in the
    format's markers, by text. With `is_parallel`, several calls are allowed. With `is_optional`, an answer
    may have text too. The parameters of the functions named in `strict` must be enforced whole.
    """

    tool_format: ToolFormat
    functions: tuple[tuple[str, Mapping[str, Any]], ...]
    is_parallel: bool
    is_optional: bool = False
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()

    def schemas(self) -> Sequence[NamedSchema]:
        """Return the schemas of the parameters, named as the request has them."""
        return [NamedSchema(f"tools[{name}]", schema, name in self.strict) for name, schema in self.functions]

    def lark(self, limits: StructureLimits, alternative: str | None = None) -> str:
        """Return the grammar. It allows the one named `alternative` too. Raises `StructureError`."""
        if alternative is None:
            return "\n".join([*self._start(), *self._rules(limits)])
        shape = self.tool_format
        start = [f"start: calls | {self._literal(shape.lead)} @{alternative}", f"calls: {self._calls}"]
        # Where calls begin as any JSON does, a lexer must not decide by their first characters.
        is_json = not shape.opening and shape.name_pattern is None
        return "\n".join([*start, *(self._json_rules(limits) if is_json else self._rules(limits))])

    def _json_rules(self, limits: StructureLimits) -> list[str]:
        """Return the rules of calls that are JSON objects."""
        key = self.tool_format.arguments_key
        rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(self.functions)))}"]
        for index, (name, schema) in enumerate(self.functions):
            self._check(name, schema, limits)
            call = {
                "type": "object",
                "properties": {"name": {"const": name}, key: _moved(schema, f"#/properties/{key}")},
                "required": ["name", key],
                "additionalProperties": False,
                "x-guidance": JSON_OPTIONS,
            }
            rules.append(f"call_{index}: %json {schema_text(call, limits)}")
        return rules

    def _check(self, name: str, schema: Mapping[str, Any], limits: StructureLimits) -> None:
        try:
            check_schema(schema, limits)
        except StructureError as error:
            raise StructureError(str(error), f"tools[{name}]") from error

    def _rules(self, limits: StructureLimits) -> list[str]:
        indices = range(len(self.functions))
        rules = [
            f"{rule}: {' | '.join(f'{rule}_{index}' for index in indices)}" for rule in ("call", "opened")
        ]
        opening = self.tool_format.opening
        for index, (name, schema) in enumerate(self.functions):
            self._check(name, schema, limits)
            before, after = self.tool_format.around(name)
            end = f"arguments_{index} {self._literal(after)}"
            rules.append(f"call_{index}: {self._literal(before)} {end}")
            rules.append(f"opened_{index}: {self._literal(before.removeprefix(opening))} {end}")
            rules += self._arguments(f"arguments_{index}", name, schema, limits)
        return rules

    def _arguments(
        self, rule: str, name: str, schema: Mapping[str, Any], limits: StructureLimits
    ) -> list[str]:
        def json_rule(value: Mapping[str, Any]) -> str:
            return f"%json {schema_text({**value, 'x-guidance': JSON_OPTIONS}, limits)}"

        style = self.tool_format.style
        if style is None:
            return [f"{rule}: {json_rule(schema)}"]
        try:
            return style.lark(rule, Parameters(schema, name in self.strict, json_rule), self._literal)
        except StructureError as error:
            raise StructureError(str(error), f"tools[{name}]") from error

    @property
    def _more(self) -> str:
        shape = self.tool_format
        return f"({self._literal(shape.between)} call)*" if self.is_parallel and not shape.is_single else ""

    @property
    def _calls(self) -> str:
        shape = self.tool_format
        return f"{self._literal(shape.prefix)} call {self._more} {self._literal(shape.suffix)}"

    def _start(self) -> list[str]:
        shape = self.tool_format
        more = self._more
        if not self.is_optional:
            return [f"start: {self._calls}"]
        if shape.lead:
            return [f"start: {self._literal(shape.lead)} TEXT | {self._calls}", "TEXT: /(?s:.*)/"]
        if not shape.opening:
            return [f"start: TEXT | {self._calls}", f"TEXT: /[^{re.escape(shape.starts)} \\n](?s:.*)/"]
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


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references are to definitions at `root`, where it is put."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return text as a Lark expression, with special tokens by their ids. `{index}` is any number."""
    pattern = "|".join(map(re.escape, (*special_tokens, "{index}")))
    return " ".join(
        f"<[{special_tokens[part]}]>"
        if part in special_tokens
        else "/[0-9]{1,4}/"
        if part == "{index}"
        else json.dumps(part, ensure_ascii=False)
        for part in re.split(f"({pattern})", text)
        if part
    )
