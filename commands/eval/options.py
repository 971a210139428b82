"""Every option of `snapserve eval`, by question. `python -m commands.eval.options` prints the tables of `docs/evaluation.md`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cache.policy import PolicyName
from commands.eval.benchmarks.benchmark import Benchmark
from commands.eval.benchmarks.suite import BENCHMARKS
from commands.eval.tasks.suite import TASKS
from commands.loadtest.config import key, number_above, url
from server.options.config import model
from server.options.option import Option, OptionGroup, choices, integer, one_of, options_table, switch, text
from server.options.paths import picture, writable_or_output

EVAL_PREFIX = "SNAPSERVE_EVAL_"


class EvalOption(Option):
    """An option whose variable is apart from those of `serve`, which has options of the same names."""

    __slots__ = ()

    @property
    def variable(self) -> str:
        return EVAL_PREFIX + self.key.upper()


class JsonOption(EvalOption):
    """Names a file; alone it stands for the standard output."""

    __slots__ = ()

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        text = f"{self.text} (default: {self.default_text}; {self.variable})"
        group.add_argument(self.flag, dest=self.key, nargs="?", const="-", metavar=self.metavar, help=text)


class Pack(StrEnum):
    """Where prefill ends and the slot is packed; whatever follows is read and written by decode."""

    BEFORE_ANSWER = "before-answer"  # the question decides what is kept
    BEFORE_QUESTION = "before-question"  # nothing that is kept was chosen for the question


def task_name(value: str) -> str:
    if value not in TASKS:
        raise ValueError(f"one of {', '.join(TASKS)}")
    return value


def compression(value: str) -> float:
    number = float(number_above(0)(value))
    if not 1 <= number < float("inf"):
        raise ValueError("a number of at least 1")
    return number


def within(least: float, most: float) -> Callable[[str], float]:
    def parse(value: str) -> float:
        number = float(number_above(-1)(value))
        if not least <= number <= most:
            raise ValueError(f"a number from {least:g} to {most:g}")
        return number

    return parse


EVAL_MODEL = Path(__file__).parent / "eval_model"
_MODEL = EvalOption(
    "model",
    model,
    str(EVAL_MODEL),
    "Folder or hub id of the model that is served.",
    "MODEL",
    "the embedded evaluation model",
)
_JSON = JsonOption(
    "json",
    writable_or_output,
    None,
    "File for the results as JSON; without one, or -, the standard output.",
    "FILE",
    "none",
)
_PLOT = EvalOption(
    "plot", picture, None, "File for a plot: .png, .svg or .pdf. Needs matplotlib.", "FILE", "none"
)
_POLICY = EvalOption(
    "policy", one_of(PolicyName), (), "Policies to measure.", choices(PolicyName), "snapstream", is_list=True
)
_COMPRESSION = EvalOption(
    "compression",
    compression,
    (),
    "Prompt tokens for each entry of a slot; every policy but full is measured at each.",
    "RATIO",
    "4",
    is_list=True,
)
_SERVE_OPTIONS = EvalOption(
    "serve-options",
    text,
    "",
    'More options of `snapserve serve`, as one text: `--serve-options="--pooling maximum"`.',
    "TEXT",
    "none",
)

_SERVED = OptionGroup(
    "Model and policies",
    (
        _MODEL,
        _POLICY,
        _COMPRESSION,
        EvalOption(
            "control",
            switch,
            False,
            "Measure a slot of 4 sinks and a ring of 32 entries too: it must lose nearly everything.",
            "",
        ),
        _SERVE_OPTIONS,
        EvalOption(
            "base-url",
            url,
            None,
            "Server to ask instead of one that is started; its slots are what they are.",
            "URL",
            "none",
        ),
        EvalOption(
            "cache-policy",
            text,
            (),
            "Pools of that server to ask, by their names.",
            "POOL",
            "those that lengths lead to",
            is_list=True,
        ),
        EvalOption("api-key", key, None, "Key to send to that server.", "KEY", "none"),
        EvalOption(
            "served-model-name",
            text,
            None,
            "Model to ask that server for.",
            "NAME",
            "the first that it lists",
        ),
        EvalOption(
            "tokenizer",
            model,
            None,
            "Folder or hub id of that server's tokenizer.",
            "MODEL",
            "that of the model's name",
        ),
        EvalOption(
            "concurrency",
            integer(1),
            8,
            "Cases that are asked at once, and slots of the engine that is started.",
            "N",
        ),
    ),
)
_CASES = OptionGroup(
    "Cases",
    (
        EvalOption("tasks", task_name, tuple(TASKS), "Tasks to ask.", "TASK", "all", is_list=True),
        EvalOption("num-cases", integer(1), 200, "Cases of each task.", "N"),
        EvalOption("length", integer(128), 4096, "Tokens of a prompt.", "TOKENS"),
        EvalOption("seed", integer(0), 0, "Of the cases: the same seed and length give the same cases.", "N"),
        EvalOption(
            "pack",
            one_of(Pack),
            Pack.BEFORE_ANSWER,
            "Where prefill ends and the slot is packed.",
            choices(Pack),
        ),
        EvalOption("chat-template", switch, False, "Ask through the model's chat template.", ""),
    ),
)
_CHAT = EvalOption("chat-template", switch, True, "Ask through the model's chat template.", "")
_SEED = EvalOption(
    "seed", integer(0), 0, "Of the answers that are drawn: sample i of a question has this seed + i.", "N"
)
_TEXT = OptionGroup(
    "Text",
    (
        EvalOption("text", text, None, "File of plain text to read.", "FILE", "must be given"),
        EvalOption("length", integer(2), 1024, "Tokens that are read before the slot is packed.", "TOKENS"),
        EvalOption(
            "num-scored", integer(2), 256, "Tokens after these whose predictions are compared.", "TOKENS"
        ),
        EvalOption("num-windows", integer(1), 8, "Such stretches of the text, at most.", "N"),
    ),
)


@dataclass(frozen=True, slots=True)
class Question:
    """What may be asked, and the options that it has."""

    name: str
    summary: str
    groups: tuple[OptionGroup, ...]


RULER = Question(
    "ruler",
    "Ask made-up questions over long contexts, read the answers from packed slots, and score them.",
    (_SERVED, _CASES, OptionGroup("Report", (_JSON, _PLOT))),
)
FIDELITY = Question(
    "fidelity",
    "Compare the predictions that packed slots make along a text with those of the whole cache.",
    (
        OptionGroup("Model and policies", (_MODEL, _POLICY, _COMPRESSION, _SERVE_OPTIONS)),
        _TEXT,
        OptionGroup("Report", (_JSON, _PLOT)),
    ),
)


def _benchmark(benchmark: Benchmark) -> Question:
    asked = OptionGroup(
        "Questions",
        (
            EvalOption(
                "data",
                text,
                None,
                "File that the authors publish: a JSON list or JSON lines.",
                "FILE",
                "must be given",
            ),
            EvalOption(
                "num-cases", integer(1), None, "Questions that are asked, the first of the file.", "N", "all"
            ),
            EvalOption(
                "length",
                integer(128),
                benchmark.length,
                "Tokens of a prompt and its answer, at most.",
                "TOKENS",
            ),
            EvalOption(
                "max-tokens", integer(1), benchmark.max_tokens, "Tokens of an answer, at most.", "TOKENS"
            ),
            EvalOption(
                "num-samples",
                integer(1),
                1,
                "Answers to each question; a question's score is their mean.",
                "N",
            ),
            EvalOption("temperature", within(0, 2), 0.0, "Of the answers; 0 is greedy.", "T", "0"),
            EvalOption(
                "top-p", within(0.01, 1), 1.0, "Share of the likeliest tokens that are drawn from.", "P", "1"
            ),
            _SEED,
            _CHAT,
        ),
    )
    summary = f"Ask the questions of {benchmark.name}, read the answers from packed slots, and score them as its authors do."
    return Question(benchmark.name, summary, (_SERVED, asked, OptionGroup("Report", (_JSON, _PLOT))))


COMPARE = Question("compare", "Compare two runs of `eval` case by case.", (OptionGroup("Report", (_JSON,)),))
QUESTIONS = (RULER, FIDELITY, *map(_benchmark, BENCHMARKS.values()), COMPARE)


def options_tables() -> str:
    """Return the options of every question as Markdown."""
    return "\n".join(
        f"## `snapserve eval {question.name}`: options\n\n{options_table(question.groups)}"
        for question in QUESTIONS
    )


if __name__ == "__main__":
    print(options_tables(), end="")
