"""`snapserve eval ruler`: every setting answers the same cases of synthetic tasks, which are scored."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

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
    """Measure every setting on every case. `save` is called with the results so far after each setting.

    `by_task` are the prompts of each task; None writes them. They may be a part of all prompts: then
    `sized_by` has all, and the engines' slots are sized for those. Raises `EvalError` if a setting cannot be
    measured, `OptionError` for sizes that do not fit.
    """
    if by_task is None:
        by_task = await asyncio.to_thread(write_prompts, config)
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
        result = SuiteResult("ruler", name, config.target.base_url, config.title, config.facts, runs)
        save(result)
    return result


def write_prompts(config: RulerConfig) -> dict[str, list[Prompt]]:
    """Return the prompts of each task. Raises `OptionError` for a length too short for a task."""
    tokenizer = config.target.load_tokenizer()
    writer = PromptWriter(
        tokenizer, config.target.length, config.pack, uses_chat_template=config.uses_chat_template
    )
    progress = ProgressLine(sys.stderr, "writing cases", len(config.tasks) * config.num_cases)
    prompts: dict[str, list[Prompt]] = {}
    try:
        for task in config.tasks:
            prompts[task.name] = []
            for index in range(config.num_cases):
                prompts[task.name].append(writer.write(task, config.seed, index))
                progress(True)
    except LengthError as error:
        raise OptionError(f"--length {config.target.length} is too short: {error}") from error
    finally:
        progress.close()
    return prompts


def task_scores(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> TaskScores:
    """Score the answers of one task."""
    scores = [
        score(prompt.case, completion.text) for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return TaskScores.of(scores, completions, prompts[0].case.answer)
