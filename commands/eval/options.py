"""Every option of `snapserve eval`, by question."""

from dataclasses import dataclass, make_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, create_model

from backends.options import Count, CountOrZero, OptionGroup, Shown, Text
from cache.policy import PolicyName
from commands.eval.benchmarks.benchmark import Benchmark
from commands.eval.benchmarks.suite import BENCHMARKS
from commands.eval.prose.layout import QuestionPosition, Turns
from commands.eval.prose.tasks import PROSE_TASKS
from commands.eval.tasks.suite import TASKS
from commands.shared.option_types import ApiKey, JsonFile, Picture, Url
from server.options.command_line import OptionSet
from server.options.models import Model
from server.options.types import one_of

EVAL_MODEL = Path(__file__).parent / "eval_model"


class Pack(StrEnum):
    """Where prefill ends and the slot is packed; decode reads and writes what follows."""

    BEFORE_ANSWER = "before-answer"  # the question decides what is kept
    BEFORE_QUESTION = "before-question"  # nothing was kept for the question's sake


_Task = Annotated[str, one_of(lambda: TASKS)]
_ProseTask = Annotated[str, one_of(lambda: PROSE_TASKS)]
_Compression = Annotated[
    float, Field(ge=1, allow_inf_nan=False), Shown("RATIO", expected="a number of at least 1")
]
_Length = Annotated[int, Field(ge=128), Shown("TOKENS")]
_Trailing = Annotated[int, Field(ge=0, le=250), Shown("TOKENS", expected="a number from 0 to 250")]
_AtLeastTwo = Annotated[int, Field(ge=2), Shown("TOKENS")]


class EvalGroup(OptionGroup):
    prefix: ClassVar[str] = "SNAPSERVE_EVAL_"


class MeasuredOptions(EvalGroup):
    """The model and the policies that are measured."""

    title: ClassVar[str] = "Model and policies"

    model: Annotated[Model, Shown(default="the embedded evaluation model")] = str(EVAL_MODEL)
    """Folder, hub id or GGUF file of the model that is served; demo and smollm2 are names too."""
    policy: Annotated[tuple[PolicyName, ...], Shown(default="snapstream")] = ()
    """Policies to measure."""
    compression: Annotated[tuple[_Compression, ...], Shown(default="4")] = ()
    """Prompt tokens for each entry of a slot; every policy but full and sparse is measured at each."""
    serve_options: Annotated[Text, Shown(default="none")] = ""
    """More options of `snapserve serve`, as one text: `--serve-options="--selection snapkv"`."""


class ServedOptions(MeasuredOptions):
    """The server that is measured, too: one that is started, or one that runs already."""

    control: bool = False
    """Measure a slot of 4 sinks and a ring of 32 entries too: it must lose nearly everything."""
    base_url: Url | None = None
    """Server to use instead of one that is started; its slots stay as they are."""
    pool: Annotated[
        tuple[Text, ...], Shown("POOL", default="those that lengths lead to", flag="cache-policy")
    ] = ()
    """Pools of that server to use, by their names."""
    api_key: ApiKey | None = None
    """Key to send to that server."""
    served_model_name: Annotated[Text | None, Shown("NAME", default="the first that it lists")] = None
    """Model to request of that server."""
    tokenizer: Annotated[Model | None, Shown(default="that of the model's name")] = None
    """Folder or hub id of that server's tokenizer."""
    concurrency: Count = 8
    """Cases that run at once, and slots of the engine that is started."""


class CaseOptions(EvalGroup):
    """The made-up cases."""

    title: ClassVar[str] = "Cases"

    tasks: Annotated[tuple[_Task, ...], Shown("TASK", default="all")] = tuple(TASKS)
    """Tasks to run."""
    num_cases: Count = 200
    """Cases of each task."""
    length: _Length = 4096
    """Tokens of a prompt."""
    seed: CountOrZero = 0
    """Of the cases: the same seed and length give the same cases."""
    pack: Pack = Pack.BEFORE_ANSWER
    """Where prefill ends and the slot is packed."""
    chat_template: bool = False
    """Send prompts through the model's chat template."""


class ProseOptions(CaseOptions):
    """The cases: facts in real prose."""

    tasks: Annotated[tuple[_ProseTask, ...], Shown("TASK", default="all")] = tuple(PROSE_TASKS)
    """Tasks to run."""
    chat_template: bool = True
    """Send prompts through the model's chat template."""
    haystack: Annotated[Text, Shown("TEXT")] = "prose"
    """Text around the facts: `novel`, `jargon`, `prose` (one of both for each case), or a file."""
    question_position: QuestionPosition = QuestionPosition.LAST
    """Where the question is in the user's message."""
    trailing_tokens: _Trailing = 0
    """Tokens of instructions that end the user's message, cut at a sentence's end."""
    turns: Turns = Turns.ONE
    """With several, an unrelated exchange is between the document and the question."""
    answer_prefix: bool = False
    """End prompts with the first words of the answer."""


class TextOptions(EvalGroup):
    """The text that is read."""

    title: ClassVar[str] = "Text"

    text: Annotated[Text | None, Shown("FILE", default="required")] = None
    """File of plain text to read."""
    length: _AtLeastTwo = 1024
    """Tokens that are read before the slot is packed."""
    num_scored: _AtLeastTwo = 256
    """Tokens after these whose predictions are compared."""
    num_windows: Count = 8
    """Such stretches of the text, at most."""


class QuestionOptions(EvalGroup):
    """The questions of a benchmark."""

    title: ClassVar[str] = "Questions"

    data: Annotated[Text | None, Shown("FILE", default="required")] = None
    """File that the authors publish: a JSON list or JSON lines."""
    num_cases: Annotated[Count | None, Shown(default="all")] = None
    """Number of questions, the first of the file."""
    length: _Length = 4096
    """Tokens of a prompt and its answer, at most."""
    max_tokens: Annotated[Count, Shown("TOKENS")] = 128
    """Tokens of an answer, at most."""
    num_samples: Count = 1
    """Answers to each question; a question's score is their mean."""
    temperature: Annotated[
        float, Field(ge=0, le=2), Shown("T", default="0", expected="a number from 0 to 2")
    ] = 0.0
    """Of the answers; 0 is greedy."""
    top_p: Annotated[
        float, Field(ge=0.01, le=1), Shown("P", default="1", expected="a number from 0.01 to 1")
    ] = 1.0
    """Share of the likeliest tokens that are drawn from."""
    seed: CountOrZero = 0
    """Of the answers that are drawn: sample i of a question has this seed + i."""
    chat_template: bool = True
    """Send prompts through the model's chat template."""


class JsonOptions(EvalGroup):
    """Where results are written."""

    title: ClassVar[str] = "Report"

    json_path: Annotated[JsonFile | None, Shown(alone="-")] = None
    """File for the results as JSON; without one, or -, the standard output."""


class ReportOptions(JsonOptions):
    """Where results are written and drawn."""

    plot: Picture | None = None
    """File for a plot: .png, .svg or .pdf. Needs matplotlib."""


@dataclass(frozen=True)
class RulerOptions:
    served: ServedOptions
    cases: CaseOptions
    report: ReportOptions


@dataclass(frozen=True)
class ProseSuiteOptions:
    served: ServedOptions
    cases: ProseOptions
    report: ReportOptions


@dataclass(frozen=True)
class FidelityOptions:
    measured: MeasuredOptions
    text: TextOptions
    report: ReportOptions


@dataclass(frozen=True)
class BenchmarkOptions:
    served: ServedOptions
    questions: QuestionOptions
    report: ReportOptions


@dataclass(frozen=True)
class CompareOptions:
    report: JsonOptions


@dataclass(frozen=True, slots=True)
class Question:
    """One sub-command of `snapserve eval`."""

    name: str
    summary: str
    options: type[OptionSet]


def _benchmark(benchmark: Benchmark) -> Question:
    """Return the question of a benchmark, whose lengths are the defaults."""
    defaults = {"length": benchmark.length, "max_tokens": benchmark.max_tokens}
    fields = {
        name: (Annotated[int, *field.metadata], Field(defaults[name], description=field.description))
        for name, field in QuestionOptions.model_fields.items()
        if name in defaults
    }
    questions = create_model("QuestionOptions", __base__=QuestionOptions, **fields)  # type: ignore[call-overload]
    options = make_dataclass("Options", [("questions", questions)], bases=(BenchmarkOptions,), frozen=True)
    summary = (
        f"Run the questions of {benchmark.name}, read the answers from packed slots, "
        "and score them as its authors do."
    )
    return Question(benchmark.name, summary, options)


QUESTIONS = (
    Question(
        "ruler",
        "Run made-up questions over long contexts, read the answers from packed slots, and score them.",
        RulerOptions,
    ),
    Question(
        "prose",
        "Request facts hidden in real prose, read the answers from packed slots, and score them.",
        ProseSuiteOptions,
    ),
    Question(
        "fidelity",
        "Compare the predictions that packed slots make along a text with those of the whole cache.",
        FidelityOptions,
    ),
    *map(_benchmark, BENCHMARKS.values()),
    Question("compare", "Compare two runs of `eval` case by case.", CompareOptions),
)
