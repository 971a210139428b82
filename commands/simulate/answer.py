"""The output that all sub-commands of `simulate` share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one sub-command: lines for text output, values for JSON output, and the exit status."""

    lines: Sequence[str]
    values: dict[str, Any]
    status: int = 0

    def text(self) -> str:
        return "\n".join(("simulated: true", "", *self.lines))

    def json_text(self) -> str:
        return json.dumps({"simulated": True, **self.values}, indent=1)
