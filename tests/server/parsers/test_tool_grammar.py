"""The grammars of calls, of a preamble and of both together, followed token by token."""

from typing import Any

import pytest

from scheduler.constraints import ConstraintError
from server.grammar.compiler import Grammars
from server.grammar.structure import Preamble, Structure, StructureError, StructureKind
from server.parsers.reasoning import REASONING_FORMATS
from server.parsers.tool_format import TOOL_FORMATS
from server.parsers.tool_grammar import ToolGrammar, literal
from server.text.renderer import Renderer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "a}b"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CITY = {"City": {"enum": ["Oslo", "a}b"]}}
GOOD, BAD = '{"city": "a}b"}', '{"city": "Rome"}'
CALLS = [("f", GOOD), ("g", "{}"), ("f", '{"city": "Oslo"}')]


async def follows(renderer: Renderer, structure: Structure, text: str) -> bool | None:
    """Return whether a text may end as it does; None when it may not even begin so."""
    grammars = Grammars(renderer)
    [matcher] = grammars.matchers(await grammars.compile(structure), 1)
    grammars.close()
    for token_id in await renderer.encode(text, add_special_tokens=False):
        try:
            matcher.advance(token_id)
        except ConstraintError:
            return None
    return matcher.allowed().may_end


def calls_of(
    name: str, *, is_parallel: bool = True, is_optional: bool = False, preamble: Preamble | None = None
) -> Structure:
    functions = (("f", SCHEMA), ("g", {"type": "object", "additionalProperties": False}))
    grammar = ToolGrammar(TOOL_FORMATS[name], functions, is_parallel, is_optional)
    return Structure(StructureKind.CALLS, grammar, "tools", preamble)


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_calls_are_written_as_the_format_writes_them(renderer: Renderer, name: str) -> None:
    write = TOOL_FORMATS[name].write
    several = None if TOOL_FORMATS[name].is_single else True
    assert await follows(renderer, calls_of(name), write(CALLS)) is several
    assert await follows(renderer, calls_of(name), write(CALLS[:1])) is True
    assert await follows(renderer, calls_of(name), write(CALLS[:1])[:-1]) is False
    assert await follows(renderer, calls_of(name), write([("f", BAD)])) is None
    assert await follows(renderer, calls_of(name), write([("h", "{}")])) is None
    assert await follows(renderer, calls_of(name), "I will not.") is None
    assert await follows(renderer, calls_of(name, is_parallel=False), write(CALLS[:1])) is True
    assert await follows(renderer, calls_of(name, is_parallel=False), write(CALLS[:2])) is None


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_an_answer_is_calls_or_follows_the_schema(renderer: Renderer, name: str) -> None:
    reply = {
        "type": "object",
        "properties": {"name": {"$ref": "#/$defs/Name"}},
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"Name": {"enum": ["f", "Oslo"]}},
    }
    functions: Any = (
        ("f", {**SCHEMA, "properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": CITY}),
        ("g", {}),
    )
    calls = ToolGrammar(TOOL_FORMATS[name], functions, is_parallel=True)
    structure = Structure(
        StructureKind.CALLS,
        calls,
        "tools",
        alternative=Structure(StructureKind.JSON, reply, "response_format"),
    )
    write, lead = TOOL_FORMATS[name].write, TOOL_FORMATS[name].lead
    assert await follows(renderer, structure, write(CALLS)) is (None if lead else True)
    assert await follows(renderer, structure, write(CALLS[:1])) is True
    assert await follows(renderer, structure, lead + '{"name": "Oslo"}') is True
    assert await follows(renderer, structure, lead + '{"name": "f"}') is True
    assert await follows(renderer, structure, write([("f", BAD)])) is None
    assert await follows(renderer, structure, lead + '{"name": "Rome"}') is None
    assert await follows(renderer, structure, "I will not.") is None


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_optional_calls_are_bound_once_they_have_begun(renderer: Renderer, name: str) -> None:
    optional, tool_format = calls_of(name, is_optional=True), TOOL_FORMATS[name]
    assert await follows(renderer, optional, tool_format.write(CALLS[:1])) is True
    assert await follows(renderer, optional, tool_format.lead + "I will not.") is True
    assert await follows(renderer, optional, tool_format.write([("f", BAD)])) is None
    if tool_format.opening:
        assert await follows(renderer, optional, "Let me see.\n" + tool_format.write(CALLS)) is True
        assert await follows(renderer, optional, "Let me see.\n" + tool_format.write([("f", BAD)])) is None


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        (StructureKind.JSON, SCHEMA, GOOD, BAD),
        (StructureKind.REGEX, "[a-c]{3}", "abc", "xyz"),
        (StructureKind.CHOICE, ["yes", "no"], "no", "perhaps"),
        (StructureKind.GRAMMAR, 'start: "a" "b"+', "abb", "ba"),
        (StructureKind.GRAMMAR, 'root ::= "a" "b"+', "abb", "ba"),
    ],
)
@pytest.mark.parametrize("is_open", [False, True])
async def test_a_form_begins_after_the_preamble(
    renderer: Renderer, kind: StructureKind, value: Any, good: str, bad: str, is_open: bool
) -> None:
    structure = Structure(kind, value, "x", Preamble('"<think>"', '"</think>"', is_open))
    thought = "hm {</thin >\n</think>\n\n" if is_open else "<think>hm {</thin >\n</think>\n\n"
    assert await follows(renderer, structure, thought + good) is True
    assert await follows(renderer, structure, thought + bad) is None
    assert await follows(renderer, structure, thought) is False
    assert await follows(renderer, structure, good) is (not is_open)


@pytest.mark.parametrize(
    ("schema", "is_strict", "why"),
    [
        ({"anyOf": [{"type": "object"}]}, False, "properties"),
        ({"properties": {}, "required": 5}, False, "list of names"),
        ({"properties": {}, "required": [{}]}, False, "list of names"),
        ({"properties": {}, "required": ["a"]}, False, "not among"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, False, "no value"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, True, "pattern"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, False, None),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string"}}}, True, None),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"properties": {"a": True}}}}, True, None),
    ],
)
async def test_formats_without_quotes_enforce_objects_of_properties(
    renderer: Renderer, schema: dict[str, Any], is_strict: bool, why: str | None
) -> None:
    strict = frozenset({"f"}) if is_strict else frozenset[str]()
    for name in ("qwen3_coder", "function_gemma"):
        grammar = ToolGrammar(TOOL_FORMATS[name], (("f", schema),), is_parallel=True, strict=strict)
        compiled = Grammars(renderer).compile(Structure(StructureKind.CALLS, grammar, "tools"))
        if why is None:
            assert await compiled
            continue
        with pytest.raises(StructureError, match=why) as raised:
            await compiled
        assert raised.value.param == "tools[f]"


async def test_harmony_s_typed_answer_has_its_channels(renderer: Renderer) -> None:
    tags, lead = REASONING_FORMATS["harmony"], TOOL_FORMATS["harmony"].lead
    end = tags.end.removeprefix("<|end|>")  # a special token of the demo model, which ends its answers
    preamble = Preamble(literal(tags.start, {}), literal(end, {}), False, literal(lead, {}))
    structure = Structure(StructureKind.JSON, SCHEMA, "x", preamble)
    assert await follows(renderer, structure, tags.start + "Hm." + end + lead + GOOD) is True
    assert await follows(renderer, structure, lead + GOOD) is True
    assert await follows(renderer, structure, lead + BAD) is None
    assert await follows(renderer, structure, GOOD) is None


async def test_calls_may_follow_a_preamble(renderer: Renderer) -> None:
    structure = calls_of("hermes", preamble=Preamble('"<think>"', '"</think>"', is_open=True))
    assert await follows(renderer, structure, "so</think>\n\n" + TOOL_FORMATS["hermes"].write(CALLS)) is True


async def test_special_tokens_are_ids_in_a_grammar(renderer: Renderer) -> None:
    special = {"<|user|>": renderer.info.added_tokens["<|user|>"]}
    structure = Structure(
        StructureKind.REGEX, "ab", "x", Preamble('"<"', f"<[{special['<|user|>']}]>", is_open=True)
    )
    assert await follows(renderer, structure, "hm<|user|>ab") is True
    assert await follows(renderer, structure, "hm<|system|>ab") is None


@pytest.mark.parametrize(
    ("schemas", "why"),
    [
        ([{"not": {}}], "not"),
        ([{"x-guidance": {"lenient": True}}], "x-guidance"),
        ([{"type": "number", "minimum": float("nan")}], "number"),
        ([{"enum": ["x" * 70_000]}], "characters"),
        ([{"enum": ["x" * 60_000]}] * 5, "characters"),
    ],
)
async def test_the_schemas_of_functions_are_checked_as_others_are(
    renderer: Renderer, schemas: list[dict[str, Any]], why: str
) -> None:
    functions = tuple((f"f{number}", schema) for number, schema in enumerate(schemas))
    grammar = ToolGrammar(TOOL_FORMATS["hermes"], functions, is_parallel=True, strict=frozenset({"f0"}))
    with pytest.raises(StructureError, match=why):
        await Grammars(renderer).compile(Structure(StructureKind.CALLS, grammar, "tools"))
