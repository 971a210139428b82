"""The sub-command `eval`: it runs the evaluation and writes its table, JSON and plot."""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commands.eval.options import QUESTIONS
from commands.shared.files import write_json
from server.options.option import add_options, resolve_options

if TYPE_CHECKING:
    from commands.eval.result import SaveResult, SuiteResult

NAME = "eval"
SUMMARY = "Measure what a cache policy costs in answers, read from packed slots."


def configure(parser: argparse.ArgumentParser) -> None:
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for question in QUESTIONS:
        own = questions.add_parser(
            question.name, help=question.summary, description=question.summary, allow_abbrev=False
        )
        add_options(own, question.groups)
        if question.name == "compare":
            for name in ("first", "second"):
                own.add_argument(name, metavar="FILE[#LABEL]", help="JSON of `eval`, and which of its runs")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, or 1 if a setting could not be measured. Raises `OptionError`."""
    # httpx and numpy would slow down every other sub-command.
    from commands.eval.errors import EvalError

    question = next(question for question in QUESTIONS if question.name == arguments.question)
    values = resolve_options(question.groups, arguments, os.environ)
    try:
        {"ruler": _ruler, "fidelity": _fidelity, "compare": _compare}.get(question.name, _benchmark)(
            values, arguments
        )
    except EvalError as error:
        print(f"snapserve eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("snapserve eval: interrupted", file=sys.stderr)
        return 130
    return 0


def _ruler(values: Mapping[str, Any], _: argparse.Namespace) -> None:
    from commands.eval.ruler import measure, ruler_config

    _report_suite(values, asyncio.run(measure(ruler_config(values), save=_saver(values))))


def _benchmark(values: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    from commands.eval.benchmarks.measure import benchmark_config, measure_benchmark

    _report_suite(
        values, asyncio.run(measure_benchmark(benchmark_config(arguments.question, values), _saver(values)))
    )


def _saver(values: Mapping[str, Any]) -> "SaveResult":
    """Return a function that rewrites the JSON file with the results so far."""
    from commands.eval.result import save_nothing

    path = values["json"]
    return (
        save_nothing if path in (None, "-") else lambda result: write_json(result.as_json(), path, indent=1)
    )


def _report_suite(values: Mapping[str, Any], result: "SuiteResult") -> None:
    from commands.eval.plot import plot_scores
    from commands.eval.table import suite_table

    _report(values, suite_table(result), result.as_json())
    if values["plot"] is not None:
        plot_scores(result.runs, values["plot"])


def _fidelity(values: Mapping[str, Any], _: argparse.Namespace) -> None:
    from commands.eval.fidelity import fidelity_config, measure_fidelity
    from commands.eval.fidelity_output import fidelity_table, plot_fidelity

    result = measure_fidelity(fidelity_config(values))
    _report(values, fidelity_table(result), result.as_json())
    if values["plot"] is not None:
        plot_fidelity(result, values["plot"])


def _compare(values: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    from commands.eval.compare import compare

    comparison = compare(arguments.first, arguments.second)
    _report(values, comparison.table(), comparison.as_json())


def _report(values: Mapping[str, Any], table: str, document: Mapping[str, Any]) -> None:
    """Print the table and write the JSON. The table goes to standard error if JSON goes to standard output.

    Raises `OptionError` for a file that cannot be written.
    """
    path = values["json"]
    print(table, file=sys.stderr if path == "-" else sys.stdout)
    if path is not None:
        write_json(document, path, indent=1)
