"""What a suite of questions found, of any kind: a run a setting, and how they are written down together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from commands.eval.run import Run
from server.version import server_version


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """`title` says in words what was asked, `facts` for JSON: runs of the same facts can be compared."""

    suite: str
    model_id: str
    base_url: str | None
    title: str
    facts: Mapping[str, Any]
    runs: Sequence[Run]

    @property
    def is_packed(self) -> bool:
        """Whether every answer came from packed slots alone."""
        return all(task.num_packed == task.num_tokens for run in self.runs for task in run.tasks.values())

    def as_json(self) -> dict[str, Any]:
        runs = [run.as_json() for run in self.runs]
        measured = [run for run in runs if not run["is_control"]]
        only = [
            {"mean": run["mean"], "scores": {name: task["score"] for name, task in run["tasks"].items()}}
            for run in measured
        ]
        return {
            "suite": self.suite,
            **(only[0] if len(only) == 1 else {}),
            "version": server_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": self.model_id,
            "base_url": self.base_url,
            **self.facts,
            "from_packed_slot": self.is_packed,
            "runs": runs,
        }


Keep: TypeAlias = Callable[
    [SuiteResult], None
]  # takes the results so far, so that an interruption costs no setting that was measured


def keep_nothing(_: SuiteResult) -> None:
    pass
