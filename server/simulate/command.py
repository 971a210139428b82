"""`snapserve simulate`: its arguments, and which function answers."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backends.sn40l.deployment import Execution
from backends.sn40l.hardware import machine_names
from backends.sn40l.model_config import model_names
from cache.policy import PolicyName, PolicyOptions
from server.options import OptionError
from server.simulate.arrivals import SHAPES

NAME = "simulate"
SUMMARY = "Plan capacity, replay traffic and check published figures on a simulated machine."


def configure(parser: argparse.ArgumentParser) -> None:
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for name, summary, arguments in _QUESTIONS:
        question = questions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        arguments(question)
        question.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Answer; return 0, or 1 when the answer is no: a level that cannot be met, a published figure that is missed."""
    from server.simulate.capacity import plan_answer, sweep_answer
    from server.simulate.kernels import step_answer
    from server.simulate.reproduce import reproduce_answer
    from server.simulate.traffic import replay_answer

    answers = {"plan": plan_answer, "sweep": sweep_answer, "step": step_answer, "replay": replay_answer, "reproduce": reproduce_answer}
    try:
        answer = answers[arguments.question](arguments)
    except (ValueError, OSError) as error:  # what was asked for cannot be: no such model, no room, no such trace
        raise OptionError(str(error)) from error
    print(answer.json_text() if arguments.json else answer.text())
    return answer.status


def policies(arguments: argparse.Namespace) -> list[PolicyOptions]:
    """Return the policies of the command line; those without a slot size leave it out."""
    sized = {PolicyName.FULL: None}
    return [PolicyOptions(name, slot_capacity=sized.get(name, arguments.slot_capacity)) for name in arguments.policy]


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], Sequence[Any]]:
    return lambda text: [parse(item) for item in text.split(",")]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _machine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3.1-8b", help=f"a config.json, its folder, or one of {', '.join(model_names())}")
    parser.add_argument("--machine", default="sn40l", help=f"a .toml file or one of {', '.join(machine_names())}")
    parser.add_argument("--uses-ddr", action="store_true", help="let weights that HBM cannot hold stream from DDR")
    parser.add_argument("--slot-capacity", type=_positive, default=8192, help="entries of a slot, for all policies but full")


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    _machine_arguments(parser)
    parser.add_argument("--context", type=_positive, default=32768, help="tokens of a sequence; TTFT is that of a prompt as long")
    parser.add_argument("--policy", type=_list_of(PolicyName), default=[PolicyName.FULL, PolicyName.SNAPSTREAM])
    parser.add_argument("--max-ttft", type=float, help="seconds")
    parser.add_argument("--max-tpot", type=float, help="seconds")
    parser.add_argument("--min-rate", type=float, help="tokens a second of the whole node")


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    _machine_arguments(parser)
    parser.add_argument("--batches", type=_list_of(_positive), default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=_list_of(_positive), default=[8192, 32768, 131072])
    parser.add_argument("--sockets", type=_list_of(_positive), default=[8, 16])
    parser.add_argument("--policy", type=_list_of(PolicyName), default=[PolicyName.FULL, PolicyName.SNAPSTREAM])
    parser.add_argument("--executions", type=_list_of(Execution), default=[Execution.FUSED, Execution.LOOPED])
    parser.add_argument("--plot", type=Path, help="draw tokens/s over batch into this PNG file")


def _step_arguments(parser: argparse.ArgumentParser) -> None:
    _machine_arguments(parser)
    parser.add_argument("--sockets", type=_positive, default=16)
    parser.add_argument("--batch", type=_positive, default=1)
    parser.add_argument("--execution", type=Execution, default=Execution.FUSED, choices=tuple(Execution))
    parser.add_argument("--prefill", type=_positive, help="tokens of a prompt to read, instead of a decode step")
    parser.add_argument("--trace", type=Path, help="write the step in Chrome's trace format into this file")


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    _machine_arguments(parser)
    parser.add_argument("--sockets", type=_positive, default=16)
    parser.add_argument("--policy", type=PolicyName, default=PolicyName.SNAPSTREAM)
    parser.add_argument("--num-slots", type=_positive, default=64)
    parser.add_argument("--max-model-len", type=_positive, default=32768)
    parser.add_argument("--trace", type=Path, help="a file of arrivals: JSON lines (ours or Mooncake's) or BurstGPT's CSV")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="day", help="of drawn arrivals")
    parser.add_argument("--rate", type=float, default=1.0, help="mean arrivals a second")
    parser.add_argument("--requests", type=_positive, default=86400)
    parser.add_argument("--mean-prompt", type=float, default=1000, help="tokens")
    parser.add_argument("--mean-output", type=float, default=200, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collapse", action=argparse.BooleanOptionalAction, default=True, help="take runs of equal decode steps at once")
    parser.add_argument("--series", type=Path, help="write queue and slot use over time into this CSV file")
    parser.add_argument("--plot", type=Path, help="draw the same into this PNG file")


def _reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fit", action="store_true", help="fit the parameters anew instead of taking those of the machine files")
    parser.add_argument("--strict", action="store_true", help="count figures that are known to be missed, too")
    parser.add_argument("--plots", type=Path, help="draw the pictures of the docs into this folder")


_QUESTIONS = (
    ("plan", "Find the cheapest deployment that meets a service level.", _plan_arguments),
    ("sweep", "Tabulate batch × context × sockets × policy × execution.", _sweep_arguments),
    ("step", "Show one decode or prefill step kernel by kernel.", _step_arguments),
    ("replay", "Play a trace of arrivals through the real scheduler on the virtual clock.", _replay_arguments),
    ("reproduce", "Print every published figure beside ours.", _reproduce_arguments),
)
