"""The sub-command `eval`: it runs the evaluation and writes its table, JSON and plot."""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commands.eval.options import (
    QUESTIONS,
    BenchmarkOptions,
    CompareOptions,
    FidelityOptions,
    JsonOptions,
    ProseSuiteOptions,
    ReportOptions,
    RulerOptions,
)
from commands.shared.files import write_json
from server.options.command_line import add_options, groups_of, read_options

if TYPE_CHECKING:
    from commands.eval.result import SaveResult, SuiteResult


def configure(parser: argparse.ArgumentParser) -> None:
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for question in QUESTIONS:
        own = questions.add_parser(
            question.name, help=question.summary, description=question.summary, allow_abbrev=False
        )
        add_options(own, groups_of(question.options))
        if question.name == "compare":
            for name in ("first", "second"):
                own.add_argument(name, metavar="FILE[#LABEL]", help="JSON of `eval`, and which of its runs")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, or 1 if a setting could not be measured. Raises `OptionError`."""
    # httpx and numpy would slow down every other sub-command.
    from commands.eval.errors import EvalError

    question = next(question for question in QUESTIONS if question.name == arguments.question)
    options = read_options(question.options, arguments, os.environ)
    try:
        match options:
            case RulerOptions():
                _ruler(options)
            case ProseSuiteOptions():
                _prose(options)
            case FidelityOptions():
                _fidelity(options)
            case BenchmarkOptions():
                _benchmark(question.name, options)
            case CompareOptions():
                _compare(options, arguments.first, arguments.second)
    except EvalError as error:
        print(f"snapserve eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("snapserve eval: interrupted", file=sys.stderr)
        return 130
    return 0


def _ruler(options: RulerOptions) -> None:
    from commands.eval.ruler import measure, ruler_config

    result = asyncio.run(measure(ruler_config(options.served, options.cases), save=_saver(options.report)))
    _report_suite(options.report, result)


def _prose(options: ProseSuiteOptions) -> None:
    from commands.eval.prose.measure import measure_prose, prose_config

    config = prose_config(options.served, options.cases)
    _report_suite(options.report, asyncio.run(measure_prose(config, _saver(options.report))))


def _benchmark(name: str, options: BenchmarkOptions) -> None:
    from commands.eval.benchmarks.measure import benchmark_config, measure_benchmark

    config = benchmark_config(name, options.served, options.questions)
    _report_suite(options.report, asyncio.run(measure_benchmark(config, _saver(options.report))))


def _saver(report: JsonOptions) -> "SaveResult":
    """Return a function that rewrites the JSON file with the results so far."""
    from commands.eval.result import save_nothing

    path = report.json_path
    if path in (None, "-"):
        return save_nothing
    return lambda result: write_json(result.as_json(), path, indent=1)


def _report_suite(report: ReportOptions, result: "SuiteResult") -> None:
    from commands.eval.plot import plot_scores
    from commands.eval.table import suite_table

    _report(report, suite_table(result), result.as_json())
    if report.plot is not None:
        plot_scores(result.runs, report.plot)


def _fidelity(options: FidelityOptions) -> None:
    from commands.eval.fidelity import fidelity_config, measure_fidelity
    from commands.eval.fidelity_output import fidelity_table, plot_fidelity

    result = measure_fidelity(fidelity_config(options.measured, options.text))
    _report(options.report, fidelity_table(result), result.as_json())
    if options.report.plot is not None:
        plot_fidelity(result, options.report.plot)


def _compare(options: CompareOptions, first: str, second: str) -> None:
    from commands.eval.compare import compare

    comparison = compare(first, second)
    _report(options.report, comparison.table(), comparison.as_json())


def _report(report: JsonOptions, table: str, document: Mapping[str, Any]) -> None:
    """Print the table and write the JSON. The table goes to standard error if JSON goes to standard output.

    Raises `OptionError` for a file that cannot be written.
    """
    path = report.json_path
    print(table, file=sys.stderr if path == "-" else sys.stdout)
    if path is not None:
        write_json(document, path, indent=1)
