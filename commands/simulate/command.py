"""The sub-command `simulate`: its sub-commands and exit status."""

import argparse
import os

from commands.simulate.options import QUESTIONS
from server.options.option import OptionError, add_options, resolve_options

NAME = "simulate"
SUMMARY = "Plan capacity, replay traffic and check published figures on a simulated machine."


def configure(parser: argparse.ArgumentParser) -> None:
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for question in QUESTIONS:
        add_options(
            questions.add_parser(
                question.name, help=question.summary, description=question.summary, allow_abbrev=False
            ),
            question.groups,
        )


def run(arguments: argparse.Namespace) -> int:
    """Print the answer. Return 0, or 1 when a published figure is missed. Raises `OptionError`."""
    from commands.simulate.capacity import plan_answer, sweep_answer
    from commands.simulate.kernels import step_answer
    from commands.simulate.reproduce import reproduce_answer
    from commands.simulate.traffic import replay_answer

    answers = {
        "plan": plan_answer,
        "sweep": sweep_answer,
        "step": step_answer,
        "replay": replay_answer,
        "reproduce": reproduce_answer,
    }
    groups = next(question.groups for question in QUESTIONS if question.name == arguments.question)
    options = argparse.Namespace(**resolve_options(groups, arguments, os.environ))
    try:
        answer = answers[arguments.question](options)
    except (ValueError, OSError) as error:
        # The options are valid one by one but not together: the model does not fit, a trace is malformed.
        raise OptionError(str(error)) from error
    print(answer.json_text() if options.json else answer.text())
    return answer.status
