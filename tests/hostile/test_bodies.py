"""Malicious bodies on every route that reads one: each is refused or answered without a server error."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile.conftest import MAX_BODY, Target

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/embeddings": {"input": "x"},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/api/chat": {
        "messages": [{"role": "user", "content": "x"}],
        "stream": False,
        "options": {"num_predict": 1},
    },
    "/api/generate": {"prompt": "x", "stream": False, "options": {"num_predict": 1}},
    "/api/show": {"model": None},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
# A second limit, which holds where a corrupted body has no longer the first one.
LIMITS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_completion_tokens": 1},
    "/v1/completions": {"n_predict": 1},
    "/v1/responses": {"max_tokens": 16},
    "/api/chat": {"request_timeout": 0.5},
    "/api/generate": {"request_timeout": 0.5},
}
REFUSED = {400, 404, 413, 415, 422}
DEEP = 100_000


def post(target: Target, path: str, content: bytes) -> int:
    """Return the status of the answer: JSON, or lines of it, and an error in its API's shape unless it is
    200.
    """
    response = httpx.post(
        target.url + path, content=content, headers={"Content-Type": "application/json"}, timeout=120
    )
    if response.status_code == 200:
        for line in response.text.splitlines() if path.startswith("/api/") else [response.text]:
            json.loads(line)
    else:
        assert_is_error(response.json(), path)
        assert len(response.content) < 2000
    return response.status_code


def assert_is_error(body: Any, path: str) -> None:
    members = set(body) - {"simulated"}  # which says how the steps' time came about
    if path.startswith("/v1/messages"):
        assert members == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    elif path.startswith("/api/"):
        assert members == {"error"}
        assert isinstance(body["error"], str)
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}


def padded(size: int, path: str) -> bytes:
    """Return a valid body of `size` bytes, filled up with white space."""
    content = json.dumps(ROUTES[path]).encode()
    return content + b" " * (size - len(content))


BOMBS = {
    "nothing": b"",
    "an array in an array in an array": b"[" * DEEP + b"]" * DEEP,
    "an array that does not end": b"[" * DEEP,
    "objects in objects": b'{"messages":' * (DEEP // 4) + b"1" + b"}" * (DEEP // 4),
    "a number of 900,000 digits": b'{"max_tokens":' + b"9" * 900_000 + b"}",
    "a fraction of 900,000 digits": b'{"temperature":0.' + b"9" * 900_000 + b"}",
    "a number beyond floats": b'{"temperature":1e999999}',
    "no number": b'{"temperature":NaN,"top_p":Infinity}',
    "100,000 fields": b"{" + b",".join(b'"%d":1' % i for i in range(80_000)) + b"}",
    "one field 50,000 times": b"{" + b",".join([b'"messages":[]'] * 50_000) + b"}",
    "100,000 items": b'{"messages":['
    + b",".join([b"{}"] * 100_000)
    + b'],"prompt":['
    + b",".join([b'""'] * 100_000)
    + b"]}",
    "bytes that are no UTF-8": b'{"prompt":"\xff\xfe\x80","input":"\xc0\xaf"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "half a surrogate pair": b'{"prompt":"\\ud800","input":"\\udfff",'
    b'"messages":[{"role":"user","content":"\\ud800"}]}',
    "half a surrogate pair as a name": b'{"\\ud800":1}',
    "a role of 70,000 letters": b'{"messages":[{"role":"%s","content":"x"}]}' % (b"a" * 70_000),
    "a NUL as a name": b'{"\\u0000":1}',
    "a string as the body": b'"x"',
    "a name of Python's own": b'{"__class__":{"__init__":1},"__proto__":{}}',
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_malformed_bodies_are_refused(target: Target, bomb: bytes) -> None:
    for path in ROUTES:
        # Ollama's routes ignore what they do not know, and need no field.
        allowed = REFUSED | {200} if path.startswith("/api/") else REFUSED
        assert post(target, path, bomb) in allowed, path


@pytest.mark.parametrize("path", ROUTES)
def test_bodies_above_the_size_limit_are_refused(target: Target, path: str) -> None:
    assert post(target, path, padded(MAX_BODY, path)) == (404 if path == "/v1/batches" else 200)
    assert post(target, path, padded(MAX_BODY + 1, path)) == 413
    assert post(target, path, padded(3 * MAX_BODY, path)) == 413


@pytest.mark.parametrize("field", ["content", "name", "tool_calls"])
def test_deeply_nested_messages_are_refused(target: Target, field: str) -> None:
    message = b'{"role":"user","content":"x","%s":%s1%s}' % (
        field.encode(),
        b'[{"text":' * 5000,
        b"}]" * 5000,
    )
    assert post(target, "/v1/chat/completions", b'{"messages":[%s],"max_tokens":1}' % message) == 400


def test_last_of_duplicate_fields_wins(target: Target) -> None:
    body = b'{"prompt":"x","max_tokens":2,"max_tokens":1,"ignore_eos":true}'
    response = httpx.post(
        f"{target.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=60
    )
    assert response.json()["usage"]["completion_tokens"] == 1


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def circular() -> dict[str, object]:
    return {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


def doubling(number: int) -> dict[str, object]:
    definitions = {
        f"d{i}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{i + 1}"} for key in "ab"}}
        for i in range(number)
    }
    return {
        "$ref": "#/$defs/d0",
        "$defs": {**definitions, f"d{number}": {"type": "string", "pattern": "(a|aa)+$"}},
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "deep": nested(300),
    "circular": circular(),
    "doubling": doubling(60),
    "from elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
    "from a file": {"$ref": "file:///etc/passwd"},
    "huge repetition": {"type": "string", "pattern": "((a{1,900}){1,900}){1,900}"},
    "a long pattern": {"type": "string", "pattern": "a*" * 20_000},
    "backtracking": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    "a million items": {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}},
    "no type": {"type": ["string", 3, None]},
    "huge numbers": {"type": "integer", "minimum": -(10**400), "multipleOf": 1e-300},
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_malicious_schemas_are_refused_or_followed(target: Target, schema: dict[str, object]) -> None:
    request = ROUTES["/v1/chat/completions"]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    bodies: tuple[dict[str, Any], ...] = (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": schema, "strict": True},
            }
        },
        {"structured_outputs": {"json": schema}},
        {"tools": [tool], "tool_choice": "required"},
    )
    for options in bodies:
        assert post(target, "/v1/chat/completions", json.dumps({**request, **options}).encode()) in (200, 400)


GRAMMARS: dict[str, list[Any]] = {
    "regex": [
        "(a{1,1000}){1,1000}",
        "(" * 5000,
        "(?=a)b",
        "(a|a)*" * 500,
        "[\\ud800]",
        "\\p{X}",
        "a**" * 20_000,
        "(.*a){25}",
        "a*" * 2000,
    ],
    "grammar": [
        "start: start",
        "start: a*\na: b*\nb: a*",
        "start: " + "x" * 70_000,
        "start: /" + "a*" * 20_000 + "/",
        "root ::= root root",
        "start: %json {}",
        "\0",
    ],
    "choice": [[], [""], ["a"] * 5000, ["x" * 70_000]],
}


@pytest.mark.parametrize(
    ("kind", "value"),
    [(kind, value) for kind, values in GRAMMARS.items() for value in values],
    ids=lambda v: str(v)[:20],
)
def test_malicious_patterns_and_grammars_are_refused_or_followed(
    target: Target, kind: str, value: object
) -> None:
    body = {**ROUTES["/v1/completions"], "structured_outputs": {kind: value}}
    assert post(target, "/v1/completions", json.dumps(body).encode()) in (200, 400)


COSTLY: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"n": 10**9},
        {"n": 128, "prompt": ["x"] * 128},
        {"best_of": 100},
        {"logprobs": 10**6},
        {"prompt_logprobs": -1},
        {"max_tokens": 2**31},
        {"max_tokens": -1},
        {"stop": ["x" * 10_000]},
        {"stop": ["x"] * 1000},
        {"logit_bias": {str(i): 1 for i in range(4000)}},
        {"logit_bias": {"-1": 1}},
        {"prompt": [2**31 - 1]},
        {"prompt": [-1]},
        {"prompt": []},
        {"seed": 2**64},
        {"top_k": -2},
        {"num_prefill_tokens": -1},
        {"min_tokens": -1},
        {"prompt_embeds": "gASVAA=="},
        {"logits_processors": ["os.system"]},
        {"cache_policy": "../x"},
        {"queue_timeout": -1},
    ],
    "/v1/chat/completions": [
        {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"documents": [{"text": "x"}]},
        {"top_logprobs": 10**6, "logprobs": True},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}],
                }
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
                }
            ]
        },
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(500)]},
    ],
    "/v1/responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/"}]}
            ]
        }
    ],
    "/v1/messages": [{"max_tokens": -1}, {"top_k": -2}, {"system": [{"type": "image"}]}],
    "/api/generate": [{"context": [1]}, {"options": {"mirostat": 1}}, {"options": {"top_k": -2}}],
    "/v1/embeddings": [{"input": ["x"] * 3000}, {"dimensions": 10**6}, {"input": [[2**31 - 1]]}],
}


@pytest.mark.parametrize(
    ("path", "options"),
    [(path, options) for path, each in COSTLY.items() for options in each],
    ids=lambda value: str(value)[:40],
)
def test_costly_or_forbidden_options_are_refused(
    target: Target, path: str, options: dict[str, object]
) -> None:
    assert post(target, path, json.dumps({**ROUTES[path], **options}).encode()) == 400


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20)
flat = scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.text(max_size=8), scalars, max_size=4)
anything = flat | st.lists(flat, max_size=4) | st.dictionaries(st.text(max_size=8), flat, max_size=4)
FIELDS = (
    *(
        "messages",
        "prompt",
        "input",
        "model",
        "stream",
        "stop",
        "temperature",
        "n",
        "max_tokens",
        "logprobs",
        "tools",
        "tool_choice",
    ),
    *(
        "response_format",
        "structured_outputs",
        "logit_bias",
        "stream_options",
        "seed",
        "tokens",
        "dimensions",
        "reasoning",
        "metadata",
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(sorted(ROUTES)),
    options=st.dictionaries(st.sampled_from(FIELDS), anything, min_size=1, max_size=3),
)
def test_arbitrary_field_values_are_refused_or_answered(
    target: Target, path: str, options: dict[str, object]
) -> None:
    body = {**ROUTES[path], **options, "stream": None}
    if path != "/v1/responses":
        body["max_tokens"] = 1
    assert post(target, path, json.dumps(body).encode()) in REFUSED | {200}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(sorted(ROUTES)),
    position=st.integers(0, 10**6),
    junk=st.binary(min_size=1, max_size=4),
)
def test_corrupted_bodies_are_refused_or_answered(
    target: Target, path: str, position: int, junk: bytes
) -> None:
    content = json.dumps(ROUTES[path] | LIMITS.get(path, {})).encode()
    position %= len(content)
    status = post(target, path, content[:position] + junk + content[position + len(junk) :])
    assert status in REFUSED | {200, 408}
