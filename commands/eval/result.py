"""The results of a suite: one run for each setting, with their JSON form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from commands.eval.run import Run
from server.version import server_version


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """The runs of a suite. `title` describes the cases for people, `facts` for JSON.

    Two runs with equal facts can be compared case by case.
    """

    suite: str
    model_id: str
    base_url: str | None
    title: str
    facts: Mapping[str, Any]
    runs: Sequence[Run]

    @property
    def is_packed(self) -> bool:
        """Whether every token of every answer came from a packed slot."""
        return all(task.num_packed == task.num_tokens for run in self.runs for task in run.tasks.values())

    def as_json(self) -> dict[str, Any]:
        runs = [run.as_json() for run in self.runs]
        measured = [run for run in runs if not run["is_control"]]
        summary = {}
        if len(measured) == 1:
            (run,) = measured
            scores = {name: task["score"] for name, task in run["tasks"].items()}
            summary = {"mean": run["mean"], "scores": scores}
        return {
            "suite": self.suite,
            **summary,
            "version": server_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": self.model_id,
            "base_url": self.base_url,
            **self.facts,
            "from_packed_slot": self.is_packed,
            "runs": runs,
        }


SaveResult: TypeAlias = Callable[[SuiteResult], None]
"""Saves the results so far, so that an interruption loses no setting that was measured."""


def save_nothing(_: SuiteResult) -> None:
    pass
