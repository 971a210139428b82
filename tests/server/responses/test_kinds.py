"""What Codex and other agents send beside functions and messages: kept or left out, never refused."""

from typing import Any

import httpx
import pytest

PATH = "/v1/responses"
HEADER = "x-ignored-parameters"
BODY: dict[str, Any] = {"input": "Hello", "max_output_tokens": 2, "temperature": 0}
USER = {"role": "user", "content": "Hello"}
CALL = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"}


def ask(http: httpx.Client, change: dict[str, Any]) -> httpx.Response:
    response = http.post(PATH, json=BODY | change)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"client_metadata": {"a": "b"}}, "client_metadata"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "f"}]}, "tools.web_search"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "tools.namespace"),
        ({"input": [{"type": "web_search_call", "id": "w", "action": {}}, USER]}, "input.web_search_call"),
        ({"reasoning": {"effort": "low", "summary": "detailed"}}, "summary, reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"personality": "friendly"}, "personality"),
    ],
    ids=str,
)
def test_what_the_server_cannot_use_is_left_out_and_named(
    http: httpx.Client, change: dict[str, Any], named: str
) -> None:
    answer = ask(http, change)
    assert answer.headers[HEADER] == named
    assert all(tool["type"] == "function" for tool in answer.json()["tools"])


def test_calls_with_free_text_are_kept(http: httpx.Client) -> None:
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    answer = ask(http, {"input": [USER, CALL, output]}).json()
    items = http.get(f"{PATH}/{answer['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output"]
    assert items[1]["arguments"] == '{"input": "*** Begin"}'


def test_an_image_in_a_tools_result_is_a_note(http: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": "x"}],
    }
    answer = ask(http, {"input": [USER, call, output]}).json()
    items = http.get(f"{PATH}/{answer['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert items[-1]["output"] == [{"type": "input_text", "text": "(image that this model cannot read)"}]


def test_automatic_truncation_leaves_out_the_oldest_turns(http: httpx.Client) -> None:
    turns = [{"role": role, "content": "word " * 150} for _ in range(6) for role in ("user", "assistant")]
    body = {"input": [*turns, USER], "instructions": "Be brief."}
    refusal = http.post(PATH, json=BODY | body).json()["error"]
    assert refusal["code"] == "context_length_exceeded", refusal
    assert ask(http, body | {"truncation": "auto"}).json()["usage"]["input_tokens"] <= 1022
    alone = {"input": "word " * 3000, "truncation": "auto"}
    assert http.post(PATH, json=BODY | alone).json()["error"]["code"] == "context_length_exceeded"
