"""`snapserve eval ruler`: every setting answers the same cases, and each answer is scored."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from server.bench.progress import ProgressLine
from server.eval.completer import Completer, http_client
from server.eval.engine import engine
from server.eval.errors import EvalError
from server.eval.options import Pack
from server.eval.prompts import Prompt, PromptWriter, load_tokenizer
from server.eval.run import Run, TaskScores, task_scores
from server.eval.setting import Setting, model_id, serve_config, settings_of, split_options
from server.eval.tasks.case import LengthError, Task
from server.eval.tasks.suite import TASKS
from server.options import OptionError
from server.version import server_version


@dataclass(frozen=True, slots=True)
class RulerConfig:
    """Everything that `snapserve eval ruler` was told. With a `base_url`, `settings` is one of an unknown policy."""

    model: str
    settings: Sequence[Setting]
    tasks: Sequence[Task]
    num_cases: int
    length: int
    seed: int
    pack: Pack
    uses_chat_template: bool
    concurrency: int
    serve_options: tuple[str, ...] = ()
    base_url: str | None = None
    api_key: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True)
class RulerResult:
    config: RulerConfig
    model_id: str
    runs: Sequence[Run]

    @property
    def is_packed(self) -> bool:
        """Whether every answer came from packed slots alone."""
        return all(task.num_packed == task.num_tokens for run in self.runs for task in run.tasks.values())

    def as_json(self) -> dict[str, Any]:
        config, runs = self.config, [run.as_json() for run in self.runs]
        measured = [run for run in runs if not run["is_control"]]
        only = {"mean": measured[0]["mean"], "scores": {name: task["score"] for name, task in measured[0]["tasks"].items()}}
        return {
            "suite": "ruler",
            **(only if len(measured) == 1 else {}),
            "version": server_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": self.model_id,
            "base_url": config.base_url,
            "seed": config.seed,
            "num_cases": config.num_cases,
            "length": config.length,
            "pack": config.pack,
            "chat_template": config.uses_chat_template,
            "from_packed_slot": self.is_packed,
            "runs": runs,
        }


def ruler_config(values: Mapping[str, Any]) -> RulerConfig:
    """Return the configuration that options make. Raises `OptionError`."""
    if values["base_url"] is not None and values["serve_options"]:
        raise OptionError("--serve-options does not go with --base-url: the server there has been started")
    serve_options = split_options(values["serve_options"])
    has_own_engine = values["base_url"] is None
    serve_config(("--model", values["model"], *serve_options))
    return RulerConfig(
        model=values["model"],
        settings=settings_of(values["policy"], values["compression"], values["control"]) if has_own_engine else [Setting(None)],
        tasks=[TASKS[name] for name in dict.fromkeys(values["tasks"])],
        uses_chat_template=values["chat_template"],
        serve_options=serve_options,
        **{name: values[name] for name in ("num_cases", "length", "seed", "pack", "concurrency")},
        **{name: values[name] for name in ("base_url", "api_key", "served_model_name", "tokenizer")},
    )


async def measure(config: RulerConfig) -> RulerResult:
    """Ask every case of every setting. Raises `EvalError` where one cannot be asked, `OptionError` for sizes that cannot be."""
    prompts = await asyncio.to_thread(write_prompts, config)
    every_options = [_options(config, setting, prompts) for setting in config.settings]
    runs, model = [], config.model
    for setting, options in zip(config.settings, every_options, strict=True):
        if config.base_url is not None:
            model, tasks = await _ask(config, config.base_url, setting, prompts)
        else:
            async with engine(("--model", config.model, *options)) as base_url:
                _, tasks = await _ask(config, base_url, setting, prompts)
        runs.append(Run(setting, options, tasks))
    return RulerResult(config, model_id(model) if config.base_url is None else model, runs)


def write_prompts(config: RulerConfig) -> dict[str, list[Prompt]]:
    """Return the prompts of each task."""
    tokenizer = load_tokenizer(config.tokenizer or config.model)
    writer = PromptWriter(tokenizer, config.length, config.pack, uses_chat_template=config.uses_chat_template)
    progress = ProgressLine(sys.stderr, "writing cases", len(config.tasks) * config.num_cases)
    prompts: dict[str, list[Prompt]] = {}
    try:
        for task in config.tasks:
            prompts[task.name] = []
            for index in range(config.num_cases):
                prompts[task.name].append(writer.write(task, config.seed, index))
                progress(True)
    except LengthError as error:
        raise OptionError(f"--length {config.length} is too short: {error}") from error
    finally:
        progress.close()
    return prompts


def _options(config: RulerConfig, setting: Setting, prompts: Mapping[str, Sequence[Prompt]]) -> tuple[str, ...]:
    """Return the options of the engine for a setting, but for the model; none for a server that is there."""
    if config.base_url is not None:
        return ()
    every = [prompt for task in prompts.values() for prompt in task]
    base = (*config.serve_options, "--num-slots", str(config.concurrency))
    scorer = serve_config(base).backend.pools[0].policy.scorer
    window = 0 if scorer is None else scorer.observation_window
    slots = setting.slot_options(config.length, max(prompt.num_decoded for prompt in every), window)
    longest = max(len(prompt.token_ids) + prompt.max_tokens for prompt in every)
    options = (*base, *slots, "--max-model-len", str(longest))
    serve_config(options)  # what cannot be is said before anything is measured
    return options


async def _ask(
    config: RulerConfig, base_url: str, setting: Setting, prompts: Mapping[str, Sequence[Prompt]]
) -> tuple[str, dict[str, TaskScores]]:
    """Return the model's name and the scores of all tasks."""
    progress = ProgressLine(sys.stderr, setting.label, sum(map(len, prompts.values())))
    places = asyncio.Semaphore(config.concurrency)
    try:
        async with http_client(config.api_key) as http:
            completer = await Completer.open(http, base_url, config.served_model_name)

            async def ask(prompt: Prompt) -> Any:
                async with places:
                    completion = await completer.complete(prompt)
                progress(True)
                return completion

            scores = {}
            for name, of_task in prompts.items():
                async with asyncio.TaskGroup() as group:
                    asked = [group.create_task(ask(prompt)) for prompt in of_task]
                scores[name] = task_scores(of_task, [task.result() for task in asked])
            return completer.model, scores
    except* EvalError as errors:
        raise EvalError(f"{setting.label}: {errors.exceptions[0]}") from None
    finally:
        progress.close()
