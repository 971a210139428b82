"""A request's messages as the turns that chat templates take."""

from typing import Any

import pytest

from server.protocol.message_blocks import hidden
from server.protocol.messages_api import MessagesRequest


def turns(*messages: Any, **options: Any) -> list[dict[str, Any]]:
    request = MessagesRequest.model_validate({"max_tokens": 1, "messages": list(messages)} | options)
    return request.turns


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def call(call_id: str = "c", name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments, "caller": {"type": "direct"}}


def result(content: Any = None, call_id: str = "c", **options: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content} | options


def test_a_system_prompt_is_one_turn() -> None:
    said = user(text("hi"))
    expected = [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hi"}]
    assert turns(said, system="a\nb") == expected
    assert turns(said, system=[text("a"), text("b")]) == expected
    assert turns({"role": "system", "content": "b"}, said, system="a") == expected
    assert turns(said, system=[]) == turns(said) == expected[1:]


def test_who_pays_is_no_part_of_the_prompt() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2; cch=a1b2;")
    assert turns(user(text("hi")), system=[billing, text("a")])[0]["content"] == "a"
    assert turns(user(text("hi")), system=[billing]) == [{"role": "user", "content": "hi"}]


def test_a_later_system_message_joins_what_the_user_says() -> None:
    """Many templates take one system message alone, at the beginning."""
    reminder = {"role": "system", "content": [text("Be quick.")], "clear_at": "never"}
    shown = "<system-reminder>\nBe quick.\n</system-reminder>"
    assert turns(user(text("hi")), reminder) == [{"role": "user", "content": f"hi\n{shown}"}]
    assert turns(user(text("hi")), assistant(text("yes")), reminder)[2] == {"role": "user", "content": shown}
    other = {"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "x"}}]}
    assert len(turns(user(text("hi")), assistant(text("yes")), other)) == 2


def test_neighbours_of_one_role_are_one_turn() -> None:
    said = turns(user(text("a"), text("b")), user(text("c")), assistant(text("d")), assistant(text("e")))
    assert said == [{"role": "user", "content": "a\nb\nc"}, {"role": "assistant", "content": "de"}]


def test_calls_and_results() -> None:
    said = turns(
        user(text("go")),
        assistant(
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            text("I look."),
            call(city="Oslo"),
            call("d", "g"),
        ),
        user(result("rain"), result([text("no"), text("way")], "d", is_error=True), text("Well?")),
    )
    function = {"name": "f", "arguments": {"city": "Oslo"}}
    assert said[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c", "type": "function", "function": function},
                {"id": "d", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "rain", "name": "f"},
        {"role": "tool", "tool_call_id": "d", "content": "Error: no\nway", "name": "g"},
        {"role": "user", "content": "Well?"},
    ]


def test_a_result_without_content_or_call() -> None:
    assert turns(user(result())) == [{"role": "tool", "tool_call_id": "c", "content": ""}]


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"thinking": "hm", "signature": hidden("other")}, "hm"),
        ({"thinking": "", "signature": hidden("hm — é")}, "hm — é"),
        ({"thinking": "", "signature": "ErUBCkYIB"}, None),
        ({"thinking": "", "signature": "unsigned:%%%"}, None),
        ({"thinking": "", "signature": "unsigned:/w=="}, None),
        ({"thinking": ""}, None),
    ],
)
def test_reasoning_comes_back(thinking: dict[str, str], expected: str | None) -> None:
    [turn] = turns(assistant({"type": "thinking"} | thinking))
    assert turn.get("reasoning_content") == expected


def test_text_of_documents_and_search_results() -> None:
    documents = [
        {
            "type": "document",
            "title": "T",
            "source": {"type": "text", "data": "d", "media_type": "text/plain"},
        },
        {"type": "document", "source": {"type": "content", "content": [text("e")]}},
        {"type": "document", "source": {"type": "content", "content": "f"}},
    ]
    found = {"type": "search_result", "source": "s", "title": "t", "content": [text("g")]}
    [turn] = turns(user(*documents, found))
    assert turn["content"] == "T\nd\ne\nf\nt\ns\ng"
    assert turns(user(result([*documents, found])))[0]["content"] == "T\nd\ne\nf\nt\ns\ng"


def test_blocks_of_other_kinds_are_skipped() -> None:
    others = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "new"}]
    assert turns(user(*others, text("hi"))) == [{"role": "user", "content": "hi"}]
    assert turns(user(text("hi")), assistant(*others))[1] == {"role": "assistant", "content": ""}


def test_too_many_blocks_are_refused_before_they_are_validated() -> None:
    nested = [user(result([text("x")] * 3000)), user(result([text("x")] * 3000))]
    with pytest.raises(ValueError, match="6002 items"):
        turns(*nested)
