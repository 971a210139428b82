"""Measure a published benchmark: every setting answers the same questions, and each answer is scored."""

import asyncio
import hashlib
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands.eval.benchmarks.benchmark import Question, read_questions
from commands.eval.benchmarks.suite import BENCHMARKS
from commands.eval.completer import Completion
from commands.eval.errors import EvalError
from commands.eval.options import QuestionOptions, ServedOptions
from commands.eval.prompts import TokenPrompt
from commands.eval.result import SaveResult, SuiteResult, save_nothing
from commands.eval.run import Run, TaskScores
from commands.eval.setting import Setting
from commands.eval.target import Target, shown_model, target_of
from commands.shared.progress import ProgressLine
from server.options.command_line import OptionError
from server.text.tokenizer import RenderError, Tokenizer


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """The configuration of one benchmark.

    A prompt and its answer together have at most `target.length` tokens. `sampling` are fields of a request.
    """

    name: str
    target: Target
    settings: Sequence[Setting]
    questions: Sequence[Question]
    max_tokens: int
    num_samples: int
    sampling: Mapping[str, float]
    seed: int
    uses_chat_template: bool
    data_sha256: str

    @property
    def title(self) -> str:
        temperature = self.sampling["temperature"]
        sampling = (
            "greedy" if temperature == 0 else f"{self.num_samples} samples at temperature {temperature:g}"
        )
        return (
            f"{self.name}, {len(self.questions)} questions in {self.target.length} tokens "
            f"with {self.max_tokens} for the answer, {sampling}"
        )

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "data_sha256": self.data_sha256,
            "num_cases": len(self.questions),
            "length": self.target.length,
            "max_tokens": self.max_tokens,
            "num_samples": self.num_samples,
            **self.sampling,
            "seed": self.seed,
            "chat_template": self.uses_chat_template,
        }


def benchmark_config(name: str, served: ServedOptions, questions: QuestionOptions) -> BenchmarkConfig:
    """Return the configuration that options make, with the questions. Raises `OptionError`."""
    if questions.data is None:
        raise OptionError("--data must be given: the file that the benchmark's authors publish")
    if questions.max_tokens >= questions.length:
        raise OptionError(
            f"--max-tokens {questions.max_tokens} must be less than --length {questions.length}, "
            "which includes the prompt"
        )
    if questions.num_samples > 1 and questions.temperature == 0:
        raise OptionError(
            "--num-samples above 1 requires a --temperature above 0: all greedy answers are the same"
        )
    target, settings = target_of(served, questions.length)
    path = Path(questions.data)
    return BenchmarkConfig(
        name,
        target,
        settings,
        read_questions(BENCHMARKS[name], path, questions.num_cases),
        questions.max_tokens,
        questions.num_samples,
        {"temperature": questions.temperature, "top_p": questions.top_p},
        questions.seed,
        questions.chat_template,
        hashlib.sha256(path.read_bytes()).hexdigest(),
    )


async def measure_benchmark(config: BenchmarkConfig, save: SaveResult = save_nothing) -> SuiteResult:
    """Measure every setting on every question. `save` is called with the results so far after each setting.

    Raises `EvalError` if a setting cannot be measured, `OptionError` for sizes that do not fit.
    """
    prompts = await asyncio.to_thread(_prompts, config)
    samplings = [
        {**config.sampling, "seed": config.seed + sample}
        for _ in config.questions
        for sample in range(config.num_samples)
    ]
    # All options are checked before the first setting is measured.
    options_by_setting = [config.target.options(setting, prompts) for setting in config.settings]
    runs: list[Run] = []
    for setting, options in zip(config.settings, options_by_setting, strict=True):
        model, completions = await config.target.complete(setting, options, prompts, samplings)
        scores = await _scores(config, setting, completions)
        runs.append(_run(config, setting, options, scores, completions))
        name = shown_model(config.target, model)
        result = SuiteResult(config.name, name, config.target.base_url, config.title, config.facts, runs)
        save(result)
    return result


def cut_in_the_middle(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """Return the text, cut in its middle to at most `num_tokens` tokens."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    num_kept = num_tokens
    # Where the halves meet, the text may have more tokens than its halves. Then a little less is kept.
    while len(tokenizer.encode(text, add_special_tokens=False)) > num_tokens:
        half = num_kept // 2
        text = tokenizer.decode(token_ids[:half]) + tokenizer.decode(token_ids[len(token_ids) - half :])
        num_kept -= 2
    return text


def _prompts(config: BenchmarkConfig) -> list[TokenPrompt]:
    """Return the prompts, one for each sample of each question."""
    tokenizer = config.target.load_tokenizer()
    progress = ProgressLine(sys.stderr, "writing prompts", len(config.questions))
    prompts: list[TokenPrompt] = []
    try:
        for question in config.questions:
            prompts += [_prompt(config, tokenizer, question)] * config.num_samples
            progress(True)
    except RenderError as error:
        raise EvalError(
            f"the prompts cannot be written: {error}; --no-chat-template sends them without a template"
        ) from error
    finally:
        progress.close()
    return prompts


def _prompt(config: BenchmarkConfig, tokenizer: Tokenizer, question: Question) -> TokenPrompt:
    max_prompt_tokens = config.target.length - config.max_tokens
    text = question.prompt
    token_ids = _encode(tokenizer, question, text, config.uses_chat_template)
    if len(token_ids) > max_prompt_tokens and question.may_be_cut:
        num_fixed = len(_encode(tokenizer, question, "", config.uses_chat_template))
        text = cut_in_the_middle(tokenizer, text, max(max_prompt_tokens - num_fixed, 0))
        token_ids = _encode(tokenizer, question, text, config.uses_chat_template)
    if not 1 < len(token_ids) <= max_prompt_tokens:
        raise OptionError(
            f"--length {config.target.length} is too short: question {question.id} has {len(token_ids)} "
            f"tokens, and --length leaves {max_prompt_tokens} for a prompt"
        )
    # Decode takes the last token of the prompt, so that the answer's first token comes from the packed slot
    # too.
    asked = text if config.uses_chat_template else None
    return TokenPrompt(array("i", token_ids), len(token_ids) - 1, config.max_tokens, question=asked)


def _encode(tokenizer: Tokenizer, question: Question, text: str, uses_chat_template: bool) -> tuple[int, ...]:
    if not uses_chat_template:
        return tokenizer.encode(
            f"{question.system}\n\n{text}" if question.system else text, add_special_tokens=True
        )
    system = [{"role": "system", "content": question.system}] if question.system else []
    messages = [*system, {"role": "user", "content": text}]
    return tokenizer.render_chat(messages, add_generation_prompt=True, continue_final_message=False)


async def _scores(
    config: BenchmarkConfig, setting: Setting, completions: Sequence[Completion]
) -> list[float]:
    """Return each question's mean score over its samples."""
    progress = ProgressLine(sys.stderr, f"{setting.label}, scoring", len(completions))
    # An answer that is a program occupies a core while it runs.
    limit = asyncio.Semaphore(os.cpu_count() or 1)

    async def score(question: Question, completion: Completion) -> float:
        async with limit:
            value = await asyncio.to_thread(question.score, completion.text)
        progress(True)
        return value

    try:
        questions = [question for question in config.questions for _ in range(config.num_samples)]
        values = await asyncio.gather(*map(score, questions, completions))
    finally:
        progress.close()
    return [
        sum(values[start : start + config.num_samples]) / config.num_samples
        for start in range(0, len(values), config.num_samples)
    ]


def _run(
    config: BenchmarkConfig,
    setting: Setting,
    options: tuple[str, ...],
    scores: Sequence[float],
    completions: Sequence[Completion],
) -> Run:
    def scores_of(indices: Sequence[int]) -> TaskScores:
        """Return the scores of some questions, by their indices."""
        answers = [
            completions[index * config.num_samples + sample]
            for index in indices
            for sample in range(config.num_samples)
        ]
        expected = config.questions[indices[0]].answer
        return TaskScores.of([scores[index] for index in indices], answers, expected)

    names = dict.fromkeys(group for question in config.questions for group in question.groups)
    groups = {
        name: scores_of([index for index, question in enumerate(config.questions) if name in question.groups])
        for name in names
    }
    return Run(setting, options, {config.name: scores_of(range(len(scores)))}, groups)
