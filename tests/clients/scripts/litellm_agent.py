"""LiteLLM: a loop of tools that replays its answers whole, streamed and not, and typed answers."""

import json
import sys
from typing import Any

import litellm

COMMON = {"model": "openai/scripted", "api_base": sys.argv[1] + "/v1", "api_key": "none"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
REPORT = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
TYPED = {"type": "json_schema", "json_schema": {"name": "Report", "schema": REPORT, "strict": True}}


def ask(messages: list[Any], *, stream: bool, **options: Any) -> Any:
    """Return the message of an answer, as LiteLLM makes it."""
    answer = litellm.completion(**COMMON, messages=messages, tools=TOOLS, stream=stream, **options)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0].message


for stream in (False, True):
    for options, wanted in (({}, "Oslo has 7 degrees."), ({"response_format": TYPED}, None)):
        question = "How is Oslo?" if wanted else "How is Oslo, in JSON form?"
        messages = [{"role": "user", "content": question}]
        message = ask(messages, stream=stream, **options)
        [call] = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        # As a loop of LiteLLM does: with its own fields and all nulls.
        messages.append(message.model_dump() | {"provider_specific_fields": {"refusal": None}})
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "It is 7 degrees."}
        )
        content = ask(messages, stream=stream, **options).content
        assert content == wanted or json.loads(content) == {"city": "Oslo", "degrees": 7}, content
print("ok")
