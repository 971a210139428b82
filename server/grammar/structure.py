"""The structures that a client can require of an answer, and their grammars in the format of llguidance.

The size of a structure is checked before the library sees it. This module knows no tokenizer, no thread and
no HTTP.
"""

import enum
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

from server.grammar.annotations import NamedSchema
from server.grammar.token_rules import TokenChoice

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Allowed once between two JSON tokens. JSON printers need no more, and a model cannot fill its answer with
# it.
_WHITESPACE = r" |\n([ ]{0,24}|\t{0,8})"
# Lenient: keywords that cannot be enforced are warnings, which `server.grammar.compiler` reads.
JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": _WHITESPACE, "lenient": True}
_OWN_OPTIONS = "x-guidance"  # options of the library, which clients cannot set
_NUMBERS = int | float
_ALTERNATIVE = "alternative"  # the name of a grammar


class StructureError(ValueError):
    """A structure that is not supported. The message is for the client.

    `param` is the request's parameter, where it is another one than the structure's.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StructureKind(enum.Enum):
    JSON = "json"  # a JSON schema, as a mapping or as text
    REGEX = "regex"
    CHOICE = "choice"  # one of several texts
    GRAMMAR = "grammar"  # Lark, or the GBNF of llama.cpp
    CALLS = "calls"  # of tools
    TOKENS = "tokens"  # rules about single tokens


class LarkSource(Protocol):
    """A source of a Lark grammar."""

    def lark(self, limits: "StructureLimits", alternative: str | None = None) -> str:
        """Return the grammar. It allows the one named `alternative` too. Raises `StructureError`."""
        ...

    def schemas(self) -> Sequence[NamedSchema]:
        """Return the schemas that it contains."""
        ...


@dataclass(frozen=True, slots=True)
class Preamble:
    """Optional free text at an answer's start, from `start` up to `end`, both in Lark.

    `is_open` says that the prompt ends with `start`. `lead` follows in any case, in Lark too.
    """

    start: str
    end: str
    is_open: bool
    lead: str = ""

    def lark(self) -> str:
        """Return a grammar that continues with the one named `answer`."""
        body = (
            f"thought: /(?s:.*)/ {self.end}"
            if self.end.startswith("<[")
            else f"thought[suffix={self.end}]: /(?s:.*)/"
        )
        start = (
            f"start: thought SPACE? {self.lead} @answer"
            if self.is_open
            else f"start: ({self.start} thought SPACE?)? {self.lead} @answer"
        )
        return f"{start}\n{body}\nSPACE: /[ \\t\\n]{{1,8}}/"


@dataclass(frozen=True, slots=True)
class Structure:
    """The required structure, and the request parameter it comes from. A preamble may precede it.

    Calls of tools may have an `alternative`: the answer is calls, or that.
    """

    kind: StructureKind
    value: str | Sequence[str] | Mapping[str, Any] | LarkSource | TokenChoice
    param: str
    preamble: Preamble | None = None
    alternative: "Structure | None" = None
    is_strict: bool = True  # a keyword of a schema that cannot be enforced is an error

    def schemas(self) -> Iterator[NamedSchema]:
        """Return the schemas of the structure."""
        if self.kind is StructureKind.CALLS and not isinstance(
            self.value, str | Sequence | Mapping | TokenChoice
        ):
            yield from self.value.schemas()
        if self.kind is StructureKind.JSON:
            schema = json.loads(self.value) if isinstance(self.value, str) else self.value
            if isinstance(schema, Mapping):
                yield NamedSchema(self.param, schema, self.is_strict)
        if self.alternative is not None:
            yield from self.alternative.schemas()


@dataclass(frozen=True, slots=True)
class StructureLimits:
    """The largest structure that is compiled."""

    max_chars: int = 65536  # of a schema as JSON, or a grammar
    max_regex_chars: int = 4096  # of all regular expressions: time and memory grow with a length's square
    max_call_chars: int = 262144  # of the grammar of all tools
    max_depth: int = 64  # of a schema's JSON
    max_values: int = 8192  # in a schema's JSON
    max_choices: int = 1024
    max_multiple: int = 100_000  # product of a schema's different `multipleOf`: the states of its matcher


def grammar_of(structure: Structure, limits: StructureLimits) -> str:
    """Return the grammar of a structure as text.

    It can take many milliseconds and does not belong on an event loop. Raises `StructureError`.
    """
    grammar = _grammar_of(structure, limits)
    if structure.preamble is None:
        return grammar
    answer, *others = json.loads(grammar)["grammars"]
    return json.dumps(
        {"grammars": [{"lark_grammar": structure.preamble.lark()}, {**answer, "name": "answer"}, *others]}
    )


def _grammar_of(structure: Structure, limits: StructureLimits) -> str:
    from llguidance import LLMatcher

    match structure.kind, structure.value:
        case StructureKind.JSON, value:
            return json_grammar(value, limits)
        case StructureKind.REGEX, str(regex):
            _check_regexes([regex], limits)
            return LLMatcher.grammar_from_regex(regex)
        case StructureKind.GRAMMAR, str(grammar):
            return _written_grammar(grammar, limits)
        case StructureKind.CHOICE, list(choices):
            return _choice_grammar(choices, limits)
        case StructureKind.CALLS, source if not isinstance(source, str | Sequence | Mapping | TokenChoice):
            alternative = structure.alternative
            grammar = source.lark(limits, None if alternative is None else _ALTERNATIVE)
            _check_size(grammar, limits.max_call_chars)
            if alternative is None:
                return _lark(grammar)
            try:
                first, *others = json.loads(_grammar_of(alternative, limits))["grammars"]
            except StructureError as error:
                raise StructureError(str(error), alternative.param) from error
            return json.dumps(
                {"grammars": [{"lark_grammar": grammar}, {**first, "name": _ALTERNATIVE}, *others]}
            )
    raise AssertionError(f"{structure.kind} cannot be {type(structure.value).__name__}")


def json_grammar(schema: object, limits: StructureLimits) -> str:
    """Return the grammar of a schema, which is a mapping or JSON text. Raises `StructureError`."""
    from llguidance import LLMatcher

    if isinstance(schema, str):
        schema = _parsed(schema, limits)
    if not isinstance(schema, Mapping):
        raise StructureError("a JSON schema must be an object")
    check_schema(schema, limits)
    text = schema_text(schema, limits)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
    except ValueError as error:
        raise StructureError(f"the schema has a value that cannot be read: {error}") from error


def schema_text(schema: Mapping[str, object], limits: StructureLimits) -> str:
    """Return a checked schema as JSON. Raises `StructureError`."""
    try:
        text = json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise StructureError("the schema has a number that is not finite") from error
    _check_size(text, limits.max_chars)
    return text


def check_schema(schema: Mapping[str, object], limits: StructureLimits) -> None:
    """Raise `StructureError` for a schema that is too large to compile."""
    if _OWN_OPTIONS in schema:
        raise StructureError(f"the keyword '{_OWN_OPTIONS}' is not supported")
    num_values = 0
    multiples = set[Fraction]()
    regexes = list[str]()
    unseen: list[tuple[object, int]] = [(schema, 1)]
    while unseen:
        value, depth = unseen.pop()
        num_values += 1
        if num_values > limits.max_values:
            raise StructureError(f"the schema has more than {limits.max_values} values")
        if depth > limits.max_depth:
            raise StructureError(f"the schema is nested more than {limits.max_depth} levels deep")
        if isinstance(value, Mapping):
            if isinstance(multiple := value.get("multipleOf"), _NUMBERS):
                multiples.add(_fraction(multiple))
            regexes += _regexes_of(value)
            unseen += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            unseen += [(item, depth + 1) for item in value]
    _check_multiples(multiples, limits)
    _check_regexes(regexes, limits)


def _regexes_of(schema: Mapping[str, object]) -> list[str]:
    """Return the regular expressions of a schema, without those of its subschemas."""
    pattern = schema.get("pattern")
    properties = schema.get("patternProperties")
    return [
        *([pattern] if isinstance(pattern, str) else []),
        *(properties if isinstance(properties, Mapping) else []),
    ]


def _check_regexes(regexes: Sequence[str], limits: StructureLimits) -> None:
    num_chars = sum(map(len, regexes))
    if num_chars > limits.max_regex_chars:
        raise StructureError(
            f"its regular expressions have {num_chars} characters, more than {limits.max_regex_chars}"
        )


def _check_multiples(multiples: set[Fraction], limits: StructureLimits) -> None:
    product = 1
    for multiple in multiples:
        product *= max(multiple.numerator, multiple.denominator)
        if product > limits.max_multiple:
            raise StructureError(f"the values of 'multipleOf' multiply to more than {limits.max_multiple}")


def _fraction(number: float) -> Fraction:
    try:
        return Fraction(str(number))
    except (ValueError, OverflowError) as error:
        raise StructureError(f"'multipleOf' cannot be {str(number)[:32]}") from error


def _parsed(text: str, limits: StructureLimits) -> object:
    _check_size(text, limits.max_chars)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StructureError("the schema is not valid JSON") from error


def _choice_grammar(choices: Sequence[str], limits: StructureLimits) -> str:
    if len(choices) > limits.max_choices:
        raise StructureError(f"there are {len(choices)} choices, more than {limits.max_choices}")
    _check_size("".join(choices), limits.max_chars)
    return _lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def _written_grammar(grammar: str, limits: StructureLimits) -> str:
    from llguidance import grammar_from

    _check_size(grammar, limits.max_chars)
    _check_regexes(re.findall(r"/((?:\\.|[^/\\\n])+)/", grammar), limits)
    try:
        return _lark(grammar_from("grammar", grammar))
    except (ValueError, RecursionError) as error:
        raise StructureError(f"the grammar is neither Lark nor GBNF: {str(error)[:200]}") from error


def _check_size(text: str, limit: int) -> None:
    if len(text) > limit:
        raise StructureError(f"it has {len(text)} characters, more than {limit}")


def _lark(grammar: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})
