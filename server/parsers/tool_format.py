"""How families of models write tool calls: the markers around a call, and the position of its name."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from server.parsers.argument_style import ArgumentStyle
from server.parsers.keyword_arguments import KeywordStyle
from server.parsers.tagged_arguments import TaggedStyle


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of one family.

    Calls are written as `prefix`, the calls with `between` between them, and `suffix`. Each call is `before`,
    a JSON object and `after`. A reader looks for `opening`, and for `closing` after the objects. Without an
    `opening`, calls are the entire answer, which begins with a character of `starts`.

    With `name_pattern`, the object is the arguments. The pattern finds the name in the text before the
    object, where `before` has `{name}`, and `{index}` for the call's number. Without it, the object has a
    "name" and the arguments under `arguments_key`. With a `style`, the arguments are no JSON object.
    """

    opening: str = ""
    closing: str = ""
    prefix: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    suffix: str = ""
    arguments_key: str = "arguments"
    name_pattern: re.Pattern[str] | None = None
    starts: str = "{"
    style: ArgumentStyle | None = None
    other_openings: tuple[str, ...] = ()  # which some models of the family write
    lead: str = ""  # before an answer without calls
    is_single: bool = False  # the model ends its answer after one call
    has_short_ids: bool = False  # the family's templates require ids of nine letters and digits
    has_numbered_ids: bool = False  # they require `functions.NAME:INDEX`

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening, *self.other_openings)

    @property
    def markers(self) -> str:
        """All text around objects, which may contain special tokens."""
        own = (self.prefix, self.before, self.after, self.between, self.suffix, self.lead, *self.openings)
        return "\n".join((*own, self.closing, "" if self.style is None else self.style.markers))

    def around(self, name: str) -> tuple[str, str]:
        """Return the text before and after the arguments of a call. An index is still `{index}`."""
        if self.name_pattern is not None:
            return self.before.replace("{name}", name), self.after
        return f'{self.before}{{"name": {json.dumps(name)}, "{self.arguments_key}": ', "}" + self.after

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return calls, each a name and its arguments' JSON, as a model of the family writes them."""
        written = []
        for index, (name, arguments) in enumerate(calls):
            before, after = self.around(name)
            written.append(before.replace("{index}", str(index)) + self._styled(arguments) + after)
        return self.prefix + self.between.join(written) + self.suffix

    def example(self) -> str:
        """Return a call that shows the format to a model."""
        if self.style is None:
            return self.write([("NAME", "ARGUMENTS")])
        return self.write([("NAME", '{"PARAMETER": "VALUE"}')])

    def _styled(self, arguments: str) -> str:
        if self.style is None:
            return arguments
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
        return self.style.write(value if isinstance(value, dict) else {})


_FUNCTION_TAGS: Final = {
    "key_start": "<parameter=",
    "key_end": ">",
    "value_end": "</parameter>",
    "end": "</function>",
    "trim": "\n",
}


def _function_tags(tag: str) -> ToolFormat:
    """Return Qwen 3 Coder's format with another outer tag."""
    return ToolFormat(
        f"<{tag}>",
        f"</{tag}>",
        before=f"<{tag}>\n<function={{name}}>\n",
        after=f"</function>\n</{tag}>",
        between="\n",
        name_pattern=re.compile(r"<function=\s*([^>\s]+)\s*$"),
        style=TaggedStyle(">", **_FUNCTION_TAGS),
    )


def _gemma(opening: str, closing: str, delimiter: str) -> ToolFormat:
    return ToolFormat(
        opening,
        closing,
        before=opening + "call:{name}{",
        after="}" + closing,
        name_pattern=re.compile(r"call:\s*([\w.-]+)\s*$"),
        style=KeywordStyle("{", "}", ":", ",", (delimiter,)),
    )


TOOL_FORMATS: Final = {
    "hermes": ToolFormat(  # Qwen 2.5 and 3 too
        "<tool_call>", "</tool_call>", before="<tool_call>\n", after="\n</tool_call>", between="\n"
    ),
    "llama3_json": ToolFormat(between="; ", arguments_key="parameters"),
    "mistral": ToolFormat(
        "[TOOL_CALLS]", prefix="[TOOL_CALLS][", between=", ", suffix="]", has_short_ids=True
    ),
    "mistral_v11": ToolFormat(
        "[TOOL_CALLS]",
        before="[TOOL_CALLS]{name}[ARGS]",
        name_pattern=re.compile(r"([^\s\[\]]+)\[ARGS\]\s*$"),
        has_short_ids=True,
    ),
    "deepseek_v3": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        prefix="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
        suffix="<｜tool▁calls▁end｜>",
        name_pattern=re.compile(r"<｜tool▁sep｜>([^\s<]+)\s*```json\s*$"),
    ),
    "deepseek_v31": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        prefix="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        suffix="<｜tool▁calls▁end｜>",
        name_pattern=re.compile(r"<｜tool▁call▁begin｜>([^\s<]+)<｜tool▁sep｜>\s*$"),
    ),
    "kimi_k2": ToolFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        prefix="<|tool_calls_section_begin|>",
        before="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        suffix="<|tool_calls_section_end|>",
        name_pattern=re.compile(
            r"<\|tool_call_begin\|>\s*(?:functions\.)?([^\s<:]+):\d+\s*<\|tool_call_argument_begin\|>\s*$"
        ),
        has_numbered_ids=True,
    ),
    "granite": ToolFormat(  # 3.0 to 3.3; 4 writes as Hermes
        "<|tool_call|>", prefix="<|tool_call|>[", between=", ", suffix="]", other_openings=("<tool_call>",)
    ),
    "phi4_mini": ToolFormat(
        "functools[",
        "<|/tool_call|>",
        prefix="functools[",
        between=", ",
        suffix="]",
        other_openings=("<|tool_call|>",),
    ),
    "qwen3_coder": _function_tags("tool_call"),
    "seed_oss": _function_tags("seed:tool_call"),
    "glm45": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        before="<tool_call>{name}\n",
        after="</tool_call>",
        between="\n",
        name_pattern=re.compile(r"<tool_call>\s*([^\s<>{]+)\s*$"),
        style=TaggedStyle(
            "\n<",
            key_start="<arg_key>",
            key_end="</arg_key>",
            between="\n",
            value_start="<arg_value>",
            value_end="</arg_value>",
            end="</tool_call>",
        ),
    ),
    "minimax_m2": ToolFormat(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        prefix="<minimax:tool_call>\n",
        before='<invoke name="{name}">\n',
        after="</invoke>\n",
        suffix="</minimax:tool_call>",
        name_pattern=re.compile(r"""<invoke name=["']?([^"'>]+)["']?$"""),
        style=TaggedStyle(
            ">", key_start='<parameter name="', key_end='">', value_end="</parameter>", end="</invoke>"
        ),
    ),
    "pythonic": ToolFormat(  # Llama 3.2 and 4
        closing="]",
        prefix="[",
        before="{name}(",
        after=")",
        between=", ",
        suffix="]",
        starts="[",
        name_pattern=re.compile(r"([\w.-]+)\s*$"),
        style=KeywordStyle("(", ")", "=", ", "),
    ),
    "olmo3": ToolFormat(
        "<function_calls>",
        "</function_calls>",
        prefix="<function_calls>\n",
        before="{name}(",
        after=")",
        between="\n",
        suffix="\n</function_calls>",
        name_pattern=re.compile(r"([\w.-]+)\s*$"),
        style=KeywordStyle("(", ")", "=", ", "),
    ),
    "function_gemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "harmony": ToolFormat(  # gpt-oss; `server.parsers.harmony` reads it
        before="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        between="<|call|><|start|>assistant",
        name_pattern=re.compile(r"to=functions\.([^\s<]+)"),
        lead="<|channel|>final<|message|>",
        is_single=True,
    ),
    "json": ToolFormat(prefix="[", between=", ", suffix="]", starts="{["),
}


# What only the templates of one family have, in the order in which they are looked for.
_SIGNS: Final = {
    "<|channel|>": "harmony",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<minimax:tool_call>": "minimax_m2",
    "<seed:tool_call>": "seed_oss",
    "<start_function_call>": "function_gemma",
    "<|tool_call>": "gemma4",
    "<function_calls>": "olmo3",
    "<arg_key>": "glm45",
    "<parameter=": "qwen3_coder",
    "[ARGS]": "mistral_v11",
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁calls▁begin｜>": "deepseek_v31",
    "functools[": "phi4_mini",
    "<|tool|>": "phi4_mini",
    "<|tool_call|>": "granite",
    "[func_name1(": "pythonic",
    "<tool_call>": "hermes",
    '"parameters": ': "llama3_json",
}


def tool_format_of(chat_template: str) -> ToolFormat | None:
    """Return the format in which a chat template writes calls, or None if it shows no known one."""
    name = next((name for sign, name in _SIGNS.items() if sign in chat_template), None)
    if name == "deepseek_v31" and "```json" in chat_template:
        name = "deepseek_v3"
    return None if name is None else TOOL_FORMATS[name]
