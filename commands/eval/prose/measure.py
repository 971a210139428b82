"""`snapserve eval prose`: every setting answers the same questions about facts in real prose."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commands.eval.errors import EvalError
from commands.eval.options import Pack, ProseOptions, ServedOptions
from commands.eval.prompts import Prompt
from commands.eval.prose.haystack import Haystack, haystack_hash, load_haystacks
from commands.eval.prose.layout import QuestionPosition, Turns
from commands.eval.prose.prompts import ProsePromptWriter
from commands.eval.prose.tasks import PROSE_TASKS
from commands.eval.result import SaveResult, SuiteResult, save_nothing
from commands.eval.ruler import measure_prompts, write_cases
from commands.eval.setting import Setting
from commands.eval.target import Target, target_of
from server.options.command_line import OptionError
from server.text.tokenizer import RenderError


@dataclass(frozen=True, slots=True)
class ProseConfig:
    """The configuration of `snapserve eval prose`."""

    target: Target
    settings: Sequence[Setting]
    haystacks: Sequence[Haystack]
    cases: ProseOptions

    @property
    def suite(self) -> str:
        return "prose"

    @property
    def title(self) -> str:
        cases = self.cases
        return (
            f"{cases.num_cases} cases per task, prompts of {cases.length} tokens in {cases.haystack}, "
            f"seed {cases.seed}, question {cases.question_position}, "
            f"{cases.trailing_tokens} trailing tokens, turns {cases.turns}, packed {cases.pack}"
        )

    @property
    def facts(self) -> dict[str, Any]:
        cases = self.cases
        return {
            "seed": cases.seed,
            "num_cases": cases.num_cases,
            "length": cases.length,
            "pack": cases.pack,
            "chat_template": cases.chat_template,
            "haystack": cases.haystack,
            "haystack_sha256": haystack_hash(self.haystacks),
            "question_position": cases.question_position,
            "trailing_tokens": cases.trailing_tokens,
            "turns": cases.turns,
            "answer_prefix": cases.answer_prefix,
        }


def prose_config(served: ServedOptions, cases: ProseOptions) -> ProseConfig:
    """Return the configuration that options make. Raises `OptionError`."""
    if cases.question_position is not QuestionPosition.LAST:
        if cases.pack is Pack.BEFORE_QUESTION:
            raise OptionError(
                f"--pack before-question needs --question-position last, got {cases.question_position}"
            )
        if cases.turns is Turns.SEVERAL:
            raise OptionError(
                f"--turns several needs --question-position last, got {cases.question_position}"
            )
    if cases.turns is Turns.SEVERAL and not cases.chat_template:
        raise OptionError("--turns several needs --chat-template")
    target, settings = target_of(served, cases.length)
    return ProseConfig(target, settings, load_haystacks(cases.haystack), cases)


async def measure_prose(config: ProseConfig, save: SaveResult = save_nothing) -> SuiteResult:
    """Measure every setting on every case. `save` is called with the results so far after each setting.

    Raises `EvalError` if a setting cannot be measured, `OptionError` for sizes that do not fit.
    """
    prompts = await asyncio.to_thread(write_prose_prompts, config)
    return await measure_prompts(config, prompts, save=save)


def write_prose_prompts(config: ProseConfig) -> dict[str, list[Prompt]]:
    """Return the prompts of each task. Raises `OptionError` for a length that does not suit, `EvalError`."""
    cases = config.cases
    writer = ProsePromptWriter(config.target.load_tokenizer(), config.haystacks, cases)
    tasks = [PROSE_TASKS[name] for name in dict.fromkeys(cases.tasks)]
    try:
        return write_cases(tasks, cases.num_cases, cases.length, writer.write)
    except RenderError as error:
        raise EvalError(
            f"the prompts cannot be written: {error}; --no-chat-template sends them without a template"
        ) from error
