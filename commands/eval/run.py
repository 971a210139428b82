"""The scores of one setting, with their JSON form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, Protocol, Self

from commands.eval.completer import Completion, SlotUsage
from commands.eval.statistics import mean_interval, mean_of_means, score_interval


@dataclass(frozen=True, slots=True)
class TaskScores:
    """The scores of one task, 0 to 100 for each case.

    `num_packed` of the answers' `num_tokens` tokens were read from a packed slot. `num_packed` and
    `slot_usage` are None if the server does not report them.
    """

    scores: tuple[float, ...]
    num_tokens: int
    num_packed: int | None
    example: Mapping[str, str]
    slot_usage: SlotUsage | None = None

    @classmethod
    def of(cls, scores: Sequence[float], completions: Sequence[Completion], expected: str) -> Self:
        """Return the scores, each from 0 to 1, of these answers.

        `expected` is the right answer to the first.
        """
        return cls(
            tuple(100 * score for score in scores),
            sum(completion.num_tokens for completion in completions),
            _total_packed([completion.num_packed for completion in completions]),
            {"expected": expected, "answer": completions[0].text},
            total_usage([completion.slot_usage for completion in completions]),
        )

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)

    def joined(self, more: Self) -> Self:
        """Return the scores of these cases followed by `more`."""
        return replace(
            self,
            scores=self.scores + more.scores,
            num_tokens=self.num_tokens + more.num_tokens,
            num_packed=_total_packed([self.num_packed, more.num_packed]),
            slot_usage=total_usage([self.slot_usage, more.slot_usage]),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "score": self.mean,
            "interval": score_interval(self.scores),
            "num_tokens": self.num_tokens,
            "num_packed": self.num_packed,
            "packed_share": packed_share([self]),
            "cache": None if self.slot_usage is None else self.slot_usage.as_json(),
            "example": self.example,
            "scores": self.scores,
        }


class RunSetting(Protocol):
    """A policy at a compression. `compression` None is the whole cache, or a running server's own."""

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
    """The scores of one setting, by task.

    `options` are the options of the started engine. `groups` are the scores of subsets of the cases.
    """

    setting: RunSetting
    options: tuple[str, ...]
    tasks: Mapping[str, TaskScores]
    groups: Mapping[str, TaskScores] = field(default_factory=dict)

    @property
    def num_cases(self) -> int:
        """The number of cases that every task has."""
        return min(len(task.scores) for task in self.tasks.values())

    def joined(self, more: Self) -> Self:
        """Return the run over these cases followed by `more`. Both have the same tasks, and no groups."""
        return replace(self, tasks={name: task.joined(more.tasks[name]) for name, task in self.tasks.items()})

    @property
    def mean(self) -> float:
        return mean_of_means([task.scores for task in self.tasks.values()])

    @property
    def slot_usage(self) -> SlotUsage | None:
        return total_usage([task.slot_usage for task in self.tasks.values()])

    def as_json(self) -> dict[str, Any]:
        groups = {name: group.as_json() for name, group in self.groups.items()}
        return {
            "label": self.setting.label,
            "policy": self.setting.policy,
            "compression": self.setting.compression,
            "is_control": self.setting.is_control,
            "serve_options": self.options,
            "mean": self.mean,
            "mean_interval": mean_interval([task.scores for task in self.tasks.values()]),
            "packed_share": packed_share(list(self.tasks.values())),
            "cache": None if self.slot_usage is None else self.slot_usage.as_json(),
            "tasks": {name: task.as_json() for name, task in self.tasks.items()},
            **({"groups": groups} if groups else {}),
        }


def packed_share(tasks: Sequence[TaskScores]) -> float | None:
    """Return the share of the answers' tokens that were read from a packed slot. None if any is unknown."""
    num_tokens = sum(task.num_tokens for task in tasks)
    num_packed = _total_packed([task.num_packed for task in tasks])
    return None if num_packed is None or num_tokens == 0 else num_packed / num_tokens


def total_usage(usages: Sequence[SlotUsage | None]) -> SlotUsage | None:
    """Return the sum. None if any is unknown."""
    known = [usage for usage in usages if usage is not None]
    return reduce(add, known) if known and len(known) == len(usages) else None


def _total_packed(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
