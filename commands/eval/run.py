"""One setting's scores, and how they are written down."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, Protocol, Self

from commands.eval.completer import Completion, Held
from commands.eval.statistics import mean_interval, mean_of_means, score_interval


@dataclass(frozen=True, slots=True)
class TaskScores:
    """A task's scores, 0 to 100, case by case, how many tokens of its answers came from a packed slot, and what slots held.

    The last two are None where no server told.
    """

    scores: tuple[float, ...]
    num_tokens: int
    num_packed: int | None
    example: Mapping[str, str]
    held: Held | None = None

    @classmethod
    def of(cls, scores: Sequence[float], completions: Sequence[Completion], expected: str) -> Self:
        """Take scores from 0 to 1 and the answers that they are of; `expected` is the first one's right answer."""
        packed = [completion.num_packed for completion in completions]
        return cls(
            tuple(100 * score for score in scores),
            sum(completion.num_tokens for completion in completions),
            None if None in packed else sum(number for number in packed if number is not None),
            {"expected": expected, "answer": completions[0].text},
            all_held([completion.held for completion in completions]),
        )

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)

    def joined(self, more: Self) -> Self:
        """Return the scores of these cases and of those that come after them."""
        num_packed = (
            None if self.num_packed is None or more.num_packed is None else self.num_packed + more.num_packed
        )
        held = all_held([self.held, more.held])
        return replace(
            self,
            scores=self.scores + more.scores,
            num_tokens=self.num_tokens + more.num_tokens,
            num_packed=num_packed,
            held=held,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "score": self.mean,
            "interval": score_interval(self.scores),
            "num_tokens": self.num_tokens,
            "num_packed": self.num_packed,
            "packed_share": packed_share([self]),
            "cache": None if self.held is None else self.held.as_json(),
            "example": self.example,
            "scores": self.scores,
        }


class RunSetting(Protocol):
    """What was measured. `compression` None is the whole cache, or none of our choosing."""

    @property
    def label(self) -> str: ...
    @property
    def policy(self) -> str | None: ...
    @property
    def compression(self) -> float | None: ...
    @property
    def is_control(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Run:
    """`options` are those that the engine was started with. `groups` are parts of the tasks' cases, scored apart."""

    setting: RunSetting
    options: tuple[str, ...]
    tasks: Mapping[str, TaskScores]
    groups: Mapping[str, TaskScores] = field(default_factory=dict)

    @property
    def num_cases(self) -> int:
        """Cases of each task."""
        return min(len(task.scores) for task in self.tasks.values())

    def joined(self, more: Self) -> Self:
        """Return the run over these cases and those that come after them; both have the same tasks, and no groups."""
        return replace(self, tasks={name: task.joined(more.tasks[name]) for name, task in self.tasks.items()})

    @property
    def mean(self) -> float:
        return mean_of_means([task.scores for task in self.tasks.values()])

    @property
    def held(self) -> Held | None:
        return all_held([task.held for task in self.tasks.values()])

    def as_json(self) -> dict[str, Any]:
        return {
            "label": self.setting.label,
            "policy": self.setting.policy,
            "compression": self.setting.compression,
            "is_control": self.setting.is_control,
            "serve_options": self.options,
            "mean": self.mean,
            "mean_interval": mean_interval([task.scores for task in self.tasks.values()]),
            "packed_share": packed_share(list(self.tasks.values())),
            "cache": None if self.held is None else self.held.as_json(),
            "tasks": {name: task.as_json() for name, task in self.tasks.items()},
            **(
                {"groups": {name: group.as_json() for name, group in self.groups.items()}}
                if self.groups
                else {}
            ),
        }


def packed_share(tasks: Sequence[TaskScores]) -> float | None:
    """Return the share of the answers' tokens that were read from a packed slot; None where no server told."""
    total = sum(task.num_tokens for task in tasks)
    packed = [task.num_packed for task in tasks]
    return (
        None
        if None in packed or total == 0
        else sum(number for number in packed if number is not None) / total
    )


def all_held(parts: Sequence[Held | None]) -> Held | None:
    """Return what slots held of all parts; None where no server told of one."""
    told = [part for part in parts if part is not None]
    return reduce(add, told) if told and len(told) == len(parts) else None
