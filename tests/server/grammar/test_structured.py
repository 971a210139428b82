"""Structured output: every parameter for it, over a backend with random tokens under the mask."""

import enum
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from pydantic import BaseModel, Field

from backends.interface import Feature
from server.text.renderer import Renderer
from tests.server.events import data
from tests.server.serving import MODEL, serve, spec

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Where is the lamp?"}]
BODY: dict[str, Any] = {"messages": HELLO, "max_tokens": 300, "temperature": 2.0, "seed": 5}
COLOURS = ["red", "green", 'a "quoted" one', "naïve 🙂", "two\nlines", "back\\slash", "#x", "a|b", "a"]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(http: httpx.Client, **options: Any) -> Any:
    response = http.post(CHAT, json=BODY | options)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def text_of(http: httpx.Client, **options: Any) -> str:
    choice = ask(http, **options)
    assert choice["finish_reason"] == "stop", choice
    return str(choice["message"]["content"])


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    "option",
    [
        {"response_format": schema_format(PERSON)},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        {"response_format": {"type": "json_object", "schema": PERSON}},
        {"json_schema": PERSON},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_schema_is_followed(http: httpx.Client, option: dict[str, Any], temperature: float) -> None:
    jsonschema.validate(json.loads(text_of(http, temperature=temperature, **option)), PERSON)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["guided_choice", "structured_outputs"])
def test_a_choice_is_made(http: httpx.Client, name: str, seed: int) -> None:
    option = COLOURS if name == "guided_choice" else {"choice": COLOURS}
    assert text_of(http, seed=seed, **{name: option}) in COLOURS


@pytest.mark.parametrize(
    "regex", [r"\d{3}-[a-f]{2,4}", "[αβγ]{1,5}!", "(yes|no)( and (yes|no)){0,3}", r"[^\x00-\x7f]{2}", "🙂+ok"]
)
def test_a_regular_expression_matches_the_whole_answer(http: httpx.Client, regex: str) -> None:
    for option in ({"guided_regex": regex}, {"structured_outputs": {"regex": regex}}, {"regex": regex}):
        choice = ask(http, **option)
        assert choice["finish_reason"] == "stop" or "+" in regex
        assert re.fullmatch(regex, choice["message"]["content"]) or choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "grammar",
    ['start: sum\nsum: /[0-9]{1,3}/ ("+" sum)?', 'root ::= num ("+" num)*\nnum ::= [0-9] [0-9]? [0-9]?'],
)
def test_a_grammar_is_followed(http: httpx.Client, grammar: str) -> None:
    for option in (
        {"guided_grammar": grammar},
        {"structured_outputs": {"grammar": grammar}},
        {"ebnf": grammar},
        {"grammar": grammar},
    ):
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3})*\+?", ask(http, **option)["message"]["content"])


@pytest.mark.parametrize(
    "option", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_json_mode_gives_an_object(http: httpx.Client, option: dict[str, Any]) -> None:
    for seed in range(5):
        choice = ask(http, seed=seed, max_tokens=60, **option)
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_completions_follow_a_schema_too(http: httpx.Client) -> None:
    body = {name: value for name, value in BODY.items() if name != "messages"} | {
        "prompt": "A person:",
        "guided_json": PERSON,
    }
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), PERSON)


def test_a_stream_has_the_text_of_the_unstreamed_answer(http: httpx.Client) -> None:
    whole = text_of(http, guided_json=PERSON)
    with http.stream("POST", CHAT, json=BODY | {"guided_json": PERSON, "stream": True}) as response:
        deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in data(response)]
    assert "".join(deltas) == whole


def test_each_choice_follows_the_grammar_independently(http: httpx.Client) -> None:
    response = http.post(CHAT, json=BODY | {"n": 12, "guided_json": PERSON}).json()
    texts = [choice["message"]["content"] for choice in response["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 6


def test_a_complete_grammar_ends_the_answer_even_with_ignore_eos(http: httpx.Client) -> None:
    for option in (
        {"ignore_eos": True},
        {"min_tokens": 200},
        {"ignore_eos": True, "stop_token_ids": [40]},
        {"n": 2},
    ):
        assert re.fullmatch("[a-f]{4}", text_of(http, guided_regex="[a-f]{4}", **option))


def test_logprobs_are_returned_with_structured_output(http: httpx.Client) -> None:
    choice = ask(http, guided_regex="[0-9]{4}", logprobs=True, top_logprobs=3)
    assert "".join(token["token"] for token in choice["logprobs"]["content"]) == choice["message"]["content"]


def test_usage_counts_the_answer(http: httpx.Client) -> None:
    usage = http.post(CHAT, json=BODY | {"guided_regex": "[0-9]{4}"}).json()["usage"]
    assert 1 <= usage["completion_tokens"] <= 5


class Step(BaseModel):
    explanation: str = Field(max_length=10)
    result: int = Field(ge=0, le=99)


class Solution(BaseModel):
    """Nested models, a literal and an optional field: as in OpenAI's guide."""

    steps: list[Step] = Field(max_length=2)
    answer: Literal["yes", "no", "perhaps"]
    note: Step | None


def test_the_sdk_parses_into_models(sdk: openai.OpenAI) -> None:
    for seed in range(5):
        parsed = sdk.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Solution, max_tokens=400, temperature=2, seed=seed
        ).choices[0]
        assert parsed.finish_reason == "stop"
        assert isinstance(parsed.message.parsed, Solution)


def test_the_sdk_streams_into_models(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Solution, max_tokens=400, temperature=1, seed=1
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Solution)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "then"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        (
            {"type": "object", "properties": {"a": {"type": "object", "unevaluatedProperties": False}}},
            "unevaluatedProperties",
        ),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "http://127.0.0.1:1/schema.json"}, "127.0.0.1"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"type": "number", "multipleOf": 0.3e-9}, "multipleOf"),
    ],
    ids=str,
)
def test_an_unsupported_schema_is_refused_naming_the_keyword(
    http: httpx.Client, schema: dict[str, Any], named: str
) -> None:
    response = http.post(CHAT, json=BODY | {"response_format": schema_format(schema)})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (
        "response_format",
        "invalid_value",
        "invalid_request_error",
    )
    assert named in error["message"]


class Color(enum.Enum):
    RED = "red"


class Paint(BaseModel):
    """What pydantic writes with keywords that no grammar enforces."""

    codes: set[Literal[1, 2]]
    raw: bytes = Field(max_length=3)
    file: Path = Field(max_length=3)
    shares: dict[Color, Literal[5]] = Field(max_length=1)


def test_without_strict_such_keywords_are_annotations(http: httpx.Client) -> None:
    schema = Paint.model_json_schema()
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "paint", "schema": schema}}
    answer = http.post(CHAT, json=BODY | {"response_format": form, "max_tokens": 500})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-parameters"] == (
        "response_format.properties.codes.uniqueItems, response_format.properties.shares.propertyNames"
    )
    form["json_schema"]["strict"] = True
    error = http.post(CHAT, json=BODY | {"response_format": form}).json()["error"]
    assert (error["param"], "properties.codes.uniqueItems" in error["message"]) == ("response_format", True)


def test_a_strict_tool_is_refused_with_its_name_and_the_path(http: httpx.Client) -> None:
    tool: dict[str, Any] = {"name": "paint", "parameters": Paint.model_json_schema(), "strict": True}
    body = BODY | {"tools": [{"type": "function", "function": tool}]}
    error = http.post(CHAT, json=body).json()["error"]
    assert error["param"] == "tools"
    assert "tools[paint]" in error["message"]
    assert "'properties.codes.uniqueItems'" in error["message"]
    tool["strict"] = False
    answer = http.post(CHAT, json=body | {"tool_choice": "required", "max_tokens": 500})
    assert "tools[paint].properties.codes.uniqueItems" in answer.headers["x-ignored-parameters"]


def test_unknown_formats_are_annotations(http: httpx.Client) -> None:
    schema = {"type": "string", "format": "phone", "maxLength": 3}
    answer = http.post(CHAT, json=BODY | {"response_format": schema_format(schema)})
    assert answer.status_code == 200
    assert "x-ignored-parameters" not in answer.headers


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "repetition": {"guided_regex": "(((a{1000}){1000}){1000})"},
    "a long expression": {"guided_regex": "a" * 100_000},
    "groups": {"guided_regex": "(" * 5000 + ")" * 5000},
    "depth": {"guided_json": _nested(200)},
    "depth as text": {"guided_json": '{"items":' * 50_000 + "{}" + "}" * 50_000},
    "optional properties": {
        "guided_json": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}}
    },
    "a long enum": {"guided_json": {"enum": [f"{i:0200}" for i in range(4000)]}},
    "states": {"guided_json": {"type": "integer", "multipleOf": 999_983}},
    "states of several": {
        "guided_json": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (997, 991, 983)]}
    },
    "a huge number": {"guided_json": {"type": "string", "minLength": 10**400}},
    "no number": {"guided_json": {"type": "number", "minimum": float("nan")}},
    "intersections": {
        "guided_json": {"allOf": [{"type": "string", "pattern": f".*{c}.*{c}.*"} for c in "abcdefghij"]}
    },
    "products": {
        "guided_json": {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"{c}{i}": {"type": "null"}}} for c in "ab"]}
                for i in range(20)
            ]
        }
    },
    "a circle": {
        "guided_json": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "nothing": {"guided_json": {"allOf": [{"$ref": "#"}]}},
    "an endless grammar": {"guided_grammar": "start: start"},
    "a long grammar": {"guided_grammar": "start: " + "a " * 40_000},
    "half a character": {"guided_json": {"const": "\ud800"}},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_structure_is_refused_and_the_server_continues(http: httpx.Client, name: str) -> None:
    content = json.dumps(BODY | BOMBS[name])
    response = http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert len(response.text) < 1000
    assert text_of(http, guided_regex="[0-9]{2}").isdecimal()


def test_hostile_structures_do_not_hold_the_event_loop_up(renderer: Renderer) -> None:
    with (
        serve(renderer) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(8) as pool,
    ):
        sent = [
            pool.submit(
                http.post, CHAT, content=json.dumps(BODY | bomb), headers={"Content-Type": "application/json"}
            )
            for bomb in BOMBS.values()
        ]
        waits = []
        while not all(response.done() for response in sent):
            start = time.monotonic()
            assert http.get("/health").status_code == 200
            waits.append(time.monotonic() - start)
        assert {response.result().status_code for response in sent} == {400}
        assert max(waits) < 2


def test_a_backend_without_masks_refuses_naming_the_parameter(renderer: Renderer) -> None:
    options: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ]
    backend = spec(features=frozenset(Feature) - {Feature.TOKEN_MASK})
    with (
        serve(renderer, backend_spec=backend) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        for option, param in options:
            response = http.post(CHAT, json=BODY | option)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "unsupported_parameter"
            assert response.json()["error"]["param"] == param
        assert http.post(CHAT, json=BODY | {"response_format": {"type": "text"}}).status_code == 200
