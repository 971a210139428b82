"""`snapserve eval ruler`: every setting answers the same cases of synthetic tasks, which are scored."""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from commands.eval.completer import Completion
from commands.eval.options import CaseOptions, Pack, ServedOptions
from commands.eval.prompts import Prompt, PromptWriter
from commands.eval.result import SaveResult, SuiteResult, save_nothing
from commands.eval.run import Run, TaskScores
from commands.eval.scoring import score
from commands.eval.setting import Setting
from commands.eval.target import Target, shown_model, target_of
from commands.eval.tasks.case import LengthError, Task
from commands.eval.tasks.suite import TASKS
from commands.shared.progress import ProgressLine
from server.options.command_line import OptionError


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyTask = TypeVar("AnyTask", bound=Named)


class SuiteConfig(Protocol):
    """A suite of tasks. `title` describes the cases for people, `facts` for JSON."""

    @property
    def suite(self) -> str: ...
    @property
    def target(self) -> Target: ...
    @property
    def settings(self) -> Sequence[Setting]: ...
    @property
    def title(self) -> str: ...
    @property
    def facts(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class RulerConfig:
    """The configuration of `snapserve eval ruler`. Prompts have `target.length` tokens."""

    target: Target
    settings: Sequence[Setting]
    tasks: Sequence[Task]
    num_cases: int
    seed: int
    pack: Pack
    uses_chat_template: bool

    @property
    def suite(self) -> str:
        return "ruler"

    @property
    def title(self) -> str:
        return (
            f"{self.num_cases} cases per task, prompts of {self.target.length} tokens, seed {self.seed}, "
            f"packed {self.pack}"
        )

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "num_cases": self.num_cases,
            "length": self.target.length,
            "pack": self.pack,
            "chat_template": self.uses_chat_template,
        }


def ruler_config(served: ServedOptions, cases: CaseOptions) -> RulerConfig:
    """Return the configuration that options make. Raises `OptionError`."""
    target, settings = target_of(served, cases.length)
    tasks = [TASKS[name] for name in dict.fromkeys(cases.tasks)]
    return RulerConfig(target, settings, tasks, cases.num_cases, cases.seed, cases.pack, cases.chat_template)


async def measure(
    config: RulerConfig,
    by_task: Mapping[str, Sequence[Prompt]] | None = None,
    sized_by: Sequence[Prompt] = (),
    save: SaveResult = save_nothing,
) -> SuiteResult:
    """Measure every setting on every case, as `measure_prompts` does.

    `by_task` are the prompts of each task; None writes them. They may be a part of all prompts: then
    `sized_by` has all, and the engines' slots are sized for those.
    """
    if by_task is None:
        by_task = await asyncio.to_thread(write_prompts, config)
    return await measure_prompts(config, by_task, sized_by, save)


async def measure_prompts(
    config: SuiteConfig,
    by_task: Mapping[str, Sequence[Prompt]],
    sized_by: Sequence[Prompt] = (),
    save: SaveResult = save_nothing,
) -> SuiteResult:
    """Measure every setting on these prompts of each task.

    The engines' slots are sized for `sized_by`, or for the prompts. `save` is called with the results so far
    after each setting. Raises `EvalError` if a setting cannot be measured, `OptionError` for sizes that do
    not fit.
    """
    prompts = [prompt for of_task in by_task.values() for prompt in of_task]
    # All options are checked before the first setting is measured.
    options_by_setting = [config.target.options(setting, sized_by or prompts) for setting in config.settings]
    runs: list[Run] = []
    for setting, options in zip(config.settings, options_by_setting, strict=True):
        model, completions = await config.target.complete(setting, options, prompts)
        remaining = iter(completions)
        tasks = {
            name: task_scores(of_task, list(islice(remaining, len(of_task))))
            for name, of_task in by_task.items()
        }
        runs.append(Run(setting, options, tasks))
        name = shown_model(config.target, model)
        result = SuiteResult(config.suite, name, config.target.base_url, config.title, config.facts, runs)
        save(result)
    return result


def write_prompts(config: RulerConfig) -> dict[str, list[Prompt]]:
    """Return the prompts of each task. Raises `OptionError` for a length too short for a task."""
    tokenizer = config.target.load_tokenizer()
    writer = PromptWriter(
        tokenizer, config.target.length, config.pack, uses_chat_template=config.uses_chat_template
    )
    return write_cases(
        config.tasks,
        config.num_cases,
        config.target.length,
        lambda task, index: writer.write(task, config.seed, index),
    )


def write_cases(
    tasks: Sequence[AnyTask], num_cases: int, length: int, write: Callable[[AnyTask, int], Prompt]
) -> dict[str, list[Prompt]]:
    """Return what `write` returns for each task and index of a case, by the task's name.

    Raises `OptionError` for a length too short for a task.
    """
    progress = ProgressLine(sys.stderr, "writing cases", len(tasks) * num_cases)
    prompts: dict[str, list[Prompt]] = {}
    try:
        for task in tasks:
            prompts[task.name] = []
            for index in range(num_cases):
                prompts[task.name].append(write(task, index))
                progress(True)
    except LengthError as error:
        raise OptionError(f"--length {length} is too short: {error}") from error
    finally:
        progress.close()
    return prompts


def task_scores(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> TaskScores:
    """Score the answers of one task."""
    scores = [
        score(prompt.case, completion.text) for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return TaskScores.of(scores, completions, prompts[0].case.answer)
