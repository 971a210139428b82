"""How families of models write tool calls: the markers around a call, and the position of its name."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of one family.

    Calls are written as `prefix`, the calls with `between` between them, and `suffix`. Each call is `before`,
    a JSON object and `after`. A reader looks for `opening`, and for `closing` after the objects. Without an
    `opening`, calls are the entire answer, which begins with a character of `starts`.

    With `name_pattern`, the object is the arguments. The pattern finds the name in the text before the
    object, where `before` has `{name}`. Without it, the object has a "name" and the arguments under
    `arguments_key`.
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
    has_short_ids: bool = False  # the family's templates require ids of nine letters and digits

    @property
    def markers(self) -> str:
        """All text around objects, which may contain special tokens."""
        return "\n".join((self.prefix, self.before, self.after, self.between, self.suffix))

    def around(self, name: str) -> tuple[str, str]:
        """Return the text before and after the arguments of a call."""
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
    """Return the format in which a chat template writes calls. The default is Hermes'."""
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
