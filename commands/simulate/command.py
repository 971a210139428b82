"""The sub-command `simulate`: its sub-commands and exit status."""

import argparse
import csv
import os
from typing import TYPE_CHECKING

from commands.simulate.options import (
    QUESTIONS,
    MeasureOptions,
    PlanOptions,
    ReplayOptions,
    ReproduceOptions,
    SimulateGroup,
    StepOptions,
    SweepOptions,
)
from server.options.command_line import OptionError, add_options, read_group

if TYPE_CHECKING:
    from commands.simulate.answer import Answer


def configure(parser: argparse.ArgumentParser) -> None:
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for question in QUESTIONS:
        own = questions.add_parser(
            question.name, help=question.summary, description=question.summary, allow_abbrev=False
        )
        add_options(own, (question.options,))


def run(arguments: argparse.Namespace) -> int:
    """Print the answer. Return 0, or 1 when a prediction failed. Raises `OptionError`."""
    question = next(question for question in QUESTIONS if question.name == arguments.question)
    options = read_group(question.options, arguments, os.environ)
    try:
        answer = _answer(options)
    except (ValueError, OSError, OverflowError, RecursionError, csv.Error) as error:
        # The options are valid one by one but not together: the model does not fit, a trace is malformed.
        raise OptionError(str(error)) from error
    print(answer.json_text() if options.as_json else answer.text())
    return answer.status


def _answer(options: SimulateGroup) -> "Answer":
    """Each question imports what it needs: numpy would slow down every other sub-command."""
    match options:
        case PlanOptions():
            from commands.simulate.capacity import plan_answer

            return plan_answer(options)
        case SweepOptions():
            from commands.simulate.steps import sweep_answer

            return sweep_answer(options)
        case StepOptions():
            from commands.simulate.kernels import step_answer

            return step_answer(options)
        case ReplayOptions():
            from commands.simulate.traffic import replay_answer

            return replay_answer(options)
        case MeasureOptions():
            from commands.simulate.measure import measure_answer

            return measure_answer(options)
        case ReproduceOptions():
            from commands.simulate.reproduce import reproduce_answer

            return reproduce_answer(options)
    raise AssertionError(f"no answer for {type(options).__name__}")
