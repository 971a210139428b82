"""How families of models write calls of tools: the markers around a call, and where its name stands."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls are written as `prefix`, then each as `before`, one JSON object and `after`, with `between` between them, then `suffix`.

    A reader looks for `opening`, and for `closing` behind the objects; without an `opening`, calls are all of an answer, one that begins
    with one of `starts`. `name_pattern` finds the name in what stands before the object, where `before` has `{name}`, and the object is the
    arguments; without it, the object has a "name", and the arguments under `arguments_key`.
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
    has_short_ids: bool = False  # the family's templates want ids of nine letters and digits

    @property
    def markers(self) -> str:
        """All the text between objects, in which special tokens may be written."""
        return "\n".join((self.prefix, self.before, self.after, self.between, self.suffix))

    def around(self, name: str) -> tuple[str, str]:
        """Return what is written before and after the arguments of a call."""
        if self.name_pattern is not None:
            return self.before.replace("{name}", name), self.after
        return f'{self.before}{{"name": {json.dumps(name)}, "{self.arguments_key}": ', "}" + self.after

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return calls, each a name and its arguments' JSON, as a model of the family writes them."""
        written = [arguments.join(self.around(name)) for name, arguments in calls]
        return self.prefix + self.between.join(written) + self.suffix


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
    "json": ToolFormat(prefix="[", between=", ", suffix="]", starts="{["),
}


def tool_format_of(chat_template: str) -> ToolFormat:
    """Return the format in which a template writes calls; Hermes' where it writes none."""
    signs = {
        "[ARGS]": "mistral_v11",
        "[TOOL_CALLS]": "mistral",
        "```json": "deepseek_v3",
        "<｜tool▁calls▁begin｜>": "deepseek_v31",
        "<tool_call>": "hermes",
        '"parameters": ': "llama3_json",
    }
    if "```json" in chat_template and "<｜tool▁calls▁begin｜>" not in chat_template:
        del signs["```json"]
    return TOOL_FORMATS[next((name for sign, name in signs.items() if sign in chat_template), "hermes")]
