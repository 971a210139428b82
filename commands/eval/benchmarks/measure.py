"""A published benchmark through the served path: every setting answers the same questions, and each answer is scored."""

import asyncio
import hashlib
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands.eval.asking import Asked, asked_of, shown_model
from commands.eval.benchmarks.benchmark import Question, read_questions
from commands.eval.benchmarks.suite import BENCHMARKS
from commands.eval.completer import Completion
from commands.eval.errors import EvalError
from commands.eval.options import QuestionOptions, ServedOptions
from commands.eval.prompts import TokenPrompt
from commands.eval.result import Keep, SuiteResult, keep_nothing
from commands.eval.run import Run, TaskScores
from commands.eval.setting import Setting
from commands.shared.progress import ProgressLine
from server.options.command_line import OptionError
from server.text.tokenizer import RenderError, Tokenizer


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """Everything that was told. A prompt and its answer have at most `asked.length` tokens; `sampling` are options of a request."""

    name: str
    asked: Asked
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
        drawn = (
            "greedy"
            if self.sampling["temperature"] == 0
            else f"{self.num_samples} samples at temperature {self.sampling['temperature']:g}"
        )
        return f"{self.name}, {len(self.questions)} questions in {self.asked.length} tokens with {self.max_tokens} for the answer, {drawn}"

    @property
    def facts(self) -> dict[str, Any]:
        own = {
            "data_sha256": self.data_sha256,
            "num_cases": len(self.questions),
            "length": self.asked.length,
            "max_tokens": self.max_tokens,
        }
        drawn = {"num_samples": self.num_samples, **self.sampling, "seed": self.seed}
        return own | drawn | {"chat_template": self.uses_chat_template}


def benchmark_config(name: str, served: ServedOptions, questions: QuestionOptions) -> BenchmarkConfig:
    """Return the configuration that options make, with the questions. Raises `OptionError`."""
    if questions.data is None:
        raise OptionError("--data must be given: the file that the benchmark's authors publish")
    if questions.max_tokens >= questions.length:
        raise OptionError(
            f"--max-tokens {questions.max_tokens} must be less than --length {questions.length}, "
            "which holds the prompt too"
        )
    if questions.num_samples > 1 and questions.temperature == 0:
        raise OptionError(
            "--num-samples above 1 wants a --temperature above 0: greedy answers are all the same"
        )
    asked, settings = asked_of(served, questions.length)
    path = Path(questions.data)
    return BenchmarkConfig(
        name,
        asked,
        settings,
        read_questions(BENCHMARKS[name], path, questions.num_cases),
        questions.max_tokens,
        questions.num_samples,
        {"temperature": questions.temperature, "top_p": questions.top_p},
        questions.seed,
        questions.chat_template,
        hashlib.sha256(path.read_bytes()).hexdigest(),
    )


async def measure_benchmark(config: BenchmarkConfig, keep: Keep = keep_nothing) -> SuiteResult:
    """Ask every question of every setting; what there is after each one goes to `keep`.

    Raises `EvalError` where one cannot be asked, `OptionError` for sizes that cannot be.
    """
    prompts = await asyncio.to_thread(_prompts, config)
    samplings = [
        {**config.sampling, "seed": config.seed + sample}
        for _ in config.questions
        for sample in range(config.num_samples)
    ]
    every_options = [config.asked.options(setting, prompts) for setting in config.settings]
    runs: list[Run] = []
    for setting, options in zip(config.settings, every_options, strict=True):
        model, completions = await config.asked.ask(setting, options, prompts, samplings)
        scores = await _scores(config, setting, completions)
        runs.append(_run(config, setting, options, scores, completions))
        result = SuiteResult(
            config.name,
            shown_model(config.asked, model),
            config.asked.base_url,
            config.title,
            config.facts,
            runs,
        )
        keep(result)
    return result


def cut_in_the_middle(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """Return a text of at most so many tokens: its first and its last half of them."""
    token_ids, most = tokenizer.encode(text, add_special_tokens=False), num_tokens
    while len(tokenizer.encode(text, add_special_tokens=False)) > num_tokens:
        # Tokens may part otherwise where the halves meet: then a little less is kept.
        text = tokenizer.decode(token_ids[: most // 2]) + tokenizer.decode(
            token_ids[len(token_ids) - most // 2 :]
        )
        most -= 2
    return text


def _prompts(config: BenchmarkConfig) -> list[TokenPrompt]:
    """Return the prompt of every sample of every question."""
    tokenizer = config.asked.load_tokenizer()
    progress = ProgressLine(sys.stderr, "writing prompts", len(config.questions))
    prompts: list[TokenPrompt] = []
    try:
        for question in config.questions:
            prompts += [_prompt(config, tokenizer, question)] * config.num_samples
            progress(True)
    except RenderError as error:
        raise EvalError(
            f"the prompts cannot be written: {error}; --no-chat-template asks without one"
        ) from error
    finally:
        progress.close()
    return prompts


def _prompt(config: BenchmarkConfig, tokenizer: Tokenizer, question: Question) -> TokenPrompt:
    room = config.asked.length - config.max_tokens
    token_ids = _encode(tokenizer, question, question.prompt, config.uses_chat_template)
    if len(token_ids) > room and question.may_be_cut:
        left = room - len(_encode(tokenizer, question, "", config.uses_chat_template))
        text = cut_in_the_middle(tokenizer, question.prompt, max(left, 0))
        token_ids = _encode(tokenizer, question, text, config.uses_chat_template)
    if not 1 < len(token_ids) <= room:
        sizes = f"question {question.id} has {len(token_ids)} tokens, and --length leaves {room} for a prompt"
        raise OptionError(f"--length {config.asked.length} is too short: {sizes}")
    # The last token goes through decode: the answer's first is then read from the packed slot, as all others.
    return TokenPrompt(array("i", token_ids), len(token_ids) - 1, config.max_tokens)


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
    """Return the mean of each question's samples. Answers that are programs take a core each while they run."""
    progress = ProgressLine(sys.stderr, f"{setting.label}, scoring", len(completions))
    places = asyncio.Semaphore(os.cpu_count() or 1)

    async def score(question: Question, completion: Completion) -> float:
        async with places:
            value = await asyncio.to_thread(question.score, completion.text)
        progress(True)
        return value

    try:
        asked = [question for question in config.questions for _ in range(config.num_samples)]
        values = await asyncio.gather(*map(score, asked, completions))
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
    def part(chosen: Sequence[int]) -> TaskScores:
        answers = [
            completions[index * config.num_samples + sample]
            for index in chosen
            for sample in range(config.num_samples)
        ]
        return TaskScores.of([scores[index] for index in chosen], answers, config.questions[chosen[0]].answer)

    names = dict.fromkeys(group for question in config.questions for group in question.groups)
    groups = {
        name: part([index for index, question in enumerate(config.questions) if name in question.groups])
        for name in names
    }
    return Run(setting, options, {config.name: part(range(len(scores)))}, groups)
