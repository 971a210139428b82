"""`snapserve eval ruler`: every setting answers the same cases, and each answer is scored."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from commands.eval.asking import Asked, asked_of, shown_model
from commands.eval.completer import Completion
from commands.eval.options import CaseOptions, Pack, ServedOptions
from commands.eval.prompts import Prompt, PromptWriter
from commands.eval.result import Keep, SuiteResult, keep_nothing
from commands.eval.run import Run, TaskScores
from commands.eval.scoring import score
from commands.eval.setting import Setting
from commands.eval.tasks.case import LengthError, Task
from commands.eval.tasks.suite import TASKS
from commands.shared.progress import ProgressLine
from server.options.command_line import OptionError


@dataclass(frozen=True, slots=True)
class RulerConfig:
    """Everything that `snapserve eval ruler` was told. Prompts have `asked.length` tokens."""

    asked: Asked
    settings: Sequence[Setting]
    tasks: Sequence[Task]
    num_cases: int
    seed: int
    pack: Pack
    uses_chat_template: bool

    @property
    def title(self) -> str:
        return f"{self.num_cases} cases a task, prompts of {self.asked.length} tokens, seed {self.seed}, packed {self.pack}"

    @property
    def facts(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "seed": self.seed,
            "num_cases": self.num_cases,
            "length": self.asked.length,
            "pack": self.pack,
        }
        return own | {"chat_template": self.uses_chat_template}


def ruler_config(served: ServedOptions, cases: CaseOptions) -> RulerConfig:
    """Return the configuration that options make. Raises `OptionError`."""
    asked, settings = asked_of(served, cases.length)
    tasks = [TASKS[name] for name in dict.fromkeys(cases.tasks)]
    return RulerConfig(asked, settings, tasks, cases.num_cases, cases.seed, cases.pack, cases.chat_template)


async def measure(
    config: RulerConfig,
    by_task: Mapping[str, Sequence[Prompt]] | None = None,
    sized_by: Sequence[Prompt] = (),
    keep: Keep = keep_nothing,
) -> SuiteResult:
    """Ask every case of every setting; `by_task` are those of the configuration, where they have been written before.

    They may be some of `sized_by`, which are those that the engines' slots are then sized for. What there is after each setting goes to
    `keep`.
    Raises `EvalError` where one cannot be asked, `OptionError` for sizes that cannot be.
    """
    if by_task is None:
        by_task = await asyncio.to_thread(write_prompts, config)
    prompts = [prompt for of_task in by_task.values() for prompt in of_task]
    every_options = [config.asked.options(setting, sized_by or prompts) for setting in config.settings]
    runs: list[Run] = []
    for setting, options in zip(config.settings, every_options, strict=True):
        model, completions = await config.asked.ask(setting, options, prompts)
        given = iter(completions)
        tasks = {
            name: task_scores(of_task, list(islice(given, len(of_task)))) for name, of_task in by_task.items()
        }
        runs.append(Run(setting, options, tasks))
        result = SuiteResult(
            "ruler", shown_model(config.asked, model), config.asked.base_url, config.title, config.facts, runs
        )
        keep(result)
    return result


def write_prompts(config: RulerConfig) -> dict[str, list[Prompt]]:
    """Return the prompts of each task."""
    tokenizer = config.asked.load_tokenizer()
    writer = PromptWriter(
        tokenizer, config.asked.length, config.pack, uses_chat_template=config.uses_chat_template
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
        raise OptionError(f"--length {config.asked.length} is too short: {error}") from error
    finally:
        progress.close()
    return prompts


def task_scores(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> TaskScores:
    """Score the answers of one task."""
    scores = [
        score(prompt.case, completion.text) for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return TaskScores.of(scores, completions, prompts[0].case.answer)
