"""How a model converses: the format of its calls and of its reasoning, and what its chat template takes of itself.

Where a template knows no tools, they are told in a system message, and calls and their results as plain turns.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.options.settings import ReasoningParserName, ServerSettings, ToolParserName
from server.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from server.parsers.tool_format import TOOL_FORMATS, ToolFormat, tool_format_of


@dataclass(frozen=True, slots=True)
class Dialogue:
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    chat_template: str

    @classmethod
    def of(cls, chat_template: str, settings: ServerSettings) -> "Dialogue":
        """Return what the settings say, or what the template shows."""
        tools, reasoning = settings.tool_call_parser, settings.reasoning_parser
        return cls(
            tool_format_of(chat_template) if tools is ToolParserName.AUTO else TOOL_FORMATS[tools],
            _reasoning_of(chat_template)
            if reasoning is ReasoningParserName.AUTO
            else REASONING_FORMATS.get(reasoning),
            chat_template,
        )

    def knows(self, variable: str) -> bool:
        """Whether the template makes something of a variable."""
        return variable in self.chat_template

    def with_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, object]]
    ) -> list[Mapping[str, Any]]:
        """Return a conversation for a template that knows no tools."""
        turns = [self._as_text(message) for message in messages]
        if not tools:
            return turns
        example = self.tool_format.write([("NAME", "ARGUMENTS")])
        told = "\n".join(
            [
                "You may call these functions. Each is given as JSON, with the schema of its arguments:",
                *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
                f"To call one, write: {example}",
            ]
        )
        if turns and turns[0]["role"] in ("system", "developer") and isinstance(turns[0]["content"], str):
            return [{**turns[0], "content": f"{turns[0]['content']}\n\n{told}"}, *turns[1:]]
        return [{"role": "system", "content": told}, *turns]

    def _as_text(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message["role"] == "tool":
            return {"role": "user", "content": message["content"]}
        calls = [
            (call["function"]["name"], _json(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
        if not calls:
            return message
        content = (
            message["content"]
            if isinstance(message["content"], str)
            else "\n".join(part["text"] for part in message["content"])
        )
        written = self.tool_format.write(calls)
        return {"role": "assistant", "content": f"{content}\n{written}" if content else written}


def _json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _reasoning_of(chat_template: str) -> ReasoningFormat | None:
    return next((tags for tags in REASONING_FORMATS.values() if tags.end in chat_template), None)
