"""All tasks by name, and the random source of each case.

A task, a seed and an index determine a case on every machine.
"""

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from commands.eval.tasks.case import Task
from commands.eval.tasks.counting import CommonWordsTask, FrequentWordsTask
from commands.eval.tasks.extraction import ExtractionTask
from commands.eval.tasks.lookup import KeyValueTask, PasskeyTask
from commands.eval.tasks.needles import Haystack, NeedleTask
from commands.eval.tasks.questions import QuestionTask
from commands.eval.tasks.tracking import TrackingTask
from commands.eval.tasks.values import Kind

_SUITE: tuple[Task, ...] = (
    NeedleTask("niah_single_1", Haystack.NOISE),
    NeedleTask("niah_single_2", Haystack.PROSE),
    NeedleTask("niah_single_3", Haystack.PROSE, value=Kind.UUID),
    NeedleTask("niah_multikey_1", Haystack.PROSE, num_keys=4),
    NeedleTask("niah_multikey_2", Haystack.NEEDLES),
    NeedleTask("niah_multikey_3", Haystack.NEEDLES, key=Kind.UUID, value=Kind.UUID),
    NeedleTask("niah_multivalue", Haystack.PROSE, num_values=4),
    NeedleTask("niah_multiquery", Haystack.PROSE, num_keys=4, num_queried=4),
    TrackingTask(),
    CommonWordsTask(),
    FrequentWordsTask(),
    QuestionTask("qa_1", is_two_hop=False),
    QuestionTask("qa_2", is_two_hop=True),
    KeyValueTask(),
    PasskeyTask(),
    ExtractionTask(),
)
TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _SUITE})


def case_source(task: str, seed: int, index: int, split: Literal["eval", "train"] = "eval") -> random.Random:
    """Return the random source of one case. Training and evaluation have different sources for every seed."""
    return random.Random(f"{split}/{task}/{seed}/{index}")
