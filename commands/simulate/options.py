"""Every option of `snapserve simulate`, by question. Whatever is wrong with a value is said with its flag or variable, before any work."""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.sn40l.deployment import Execution
from cache.policy import PolicyName
from commands.simulate.arrivals import ShapeName
from server.options.option import Option, OptionGroup, choices, integer, one_of, options_table, switch
from server.options.paths import need_matplotlib, picture, readable, writable
from server.options.simulation import MACHINE_TEXT, MODEL_TEXT, machine_name, model_name

SIMULATE_PREFIX = "SNAPSERVE_SIMULATE_"


class SimulateOption(Option):
    """An option whose variable is apart from those of `serve`, which has options of the same names."""

    __slots__ = ()

    @property
    def variable(self) -> str:
        return SIMULATE_PREFIX + self.key.upper()


@dataclass(frozen=True, slots=True)
class Question:
    """What may be asked, and the options that it has."""

    name: str
    summary: str
    options: tuple[Option, ...]

    @property
    def groups(self) -> tuple[OptionGroup, ...]:
        return (OptionGroup(f"snapserve simulate {self.name}", self.options),)


def several(parse: Callable[[str], Any], of: str = "") -> Callable[[str], tuple[Any, ...]]:
    """Return the parser of values separated by commas."""

    def parse_all(value: str) -> tuple[Any, ...]:
        try:
            return tuple(parse(item.strip()) for item in value.split(","))
        except ValueError as error:
            raise ValueError(f"{of or error}, or several with commas") from error

    return parse_all


def above_zero(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError("a number above 0")
    return number


def folder(value: str) -> Path:
    need_matplotlib()
    path = Path(value)
    if path.exists() and not path.is_dir():
        raise ValueError("a folder")
    return path


def _several_of(kind: type[enum.StrEnum]) -> Callable[[str], tuple[Any, ...]]:
    return several(one_of(kind))


_MODEL = (
    SimulateOption("model", model_name, "llama-3.1-8b", MODEL_TEXT, "MODEL"),
    SimulateOption("machine", machine_name, "sn40l", MACHINE_TEXT, "MACHINE"),
    SimulateOption("uses-ddr", switch, False, "Let weights that HBM cannot hold stream from DDR.", ""),
    SimulateOption("slot-capacity", integer(1), 8192, "Entries of a slot, of all policies but full.", "N"),
)
_SOCKETS = SimulateOption("sockets", integer(1), None, "Sockets of the machine.", "N", "all")
_POLICIES = SimulateOption(
    "policy",
    _several_of(PolicyName),
    (PolicyName.FULL, PolicyName.SNAPSTREAM),
    "Cache policies.",
    "POLICY,…",
    "full,snapstream",
)
_JSON = SimulateOption("json", switch, False, "Print JSON instead of text.", "")

PLAN = Question(
    "plan",
    "Find the cheapest deployment that meets a service level.",
    (
        *_MODEL,
        SimulateOption(
            "sockets",
            several(integer(1)),
            None,
            "Sockets to choose from.",
            "N,…",
            "the powers of two that the machine has",
        ),
        SimulateOption(
            "context", integer(1), 32768, "Tokens of a sequence; TTFT is that of a prompt as long.", "TOKENS"
        ),
        _POLICIES,
        SimulateOption("max-ttft", above_zero, None, "Longest time to the first token.", "SECONDS", "any"),
        SimulateOption("max-tpot", above_zero, None, "Longest time of a decode step.", "SECONDS", "any"),
        SimulateOption(
            "min-rate", above_zero, None, "Fewest tokens a second, of the whole node.", "RATE", "any"
        ),
        _JSON,
    ),
)

SWEEP = Question(
    "sweep",
    "Tabulate batch × context × sockets × policy × execution.",
    (
        *_MODEL,
        SimulateOption("batches", several(integer(1)), (1, 4, 16, 64), "Slots.", "N,…", "1,4,16,64"),
        SimulateOption(
            "contexts", several(integer(1)), (8192, 32768, 131072), "Tokens.", "TOKENS,…", "8192,32768,131072"
        ),
        SimulateOption("sockets", several(integer(1)), None, "Sockets.", "N,…", "half of them, and all"),
        _POLICIES,
        SimulateOption(
            "executions",
            _several_of(Execution),
            (Execution.FUSED, Execution.LOOPED),
            f"Ways of cutting layers into kernel calls: {', '.join(Execution)}.",
            "EXECUTION,…",
            "fused,looped",
        ),
        SimulateOption("plot", picture, None, "Draw tokens/s over batch into this file.", "FILE", "none"),
        _JSON,
    ),
)

STEP = Question(
    "step",
    "Show one decode or prefill step kernel by kernel.",
    (
        *_MODEL,
        _SOCKETS,
        SimulateOption("batch", integer(1), 1, "Slots.", "N"),
        SimulateOption(
            "execution",
            one_of(Execution),
            Execution.FUSED,
            "How layers are cut into kernel calls.",
            choices(Execution),
        ),
        SimulateOption(
            "prefill",
            integer(1),
            None,
            "Tokens of a prompt to read, instead of a decode step.",
            "TOKENS",
            "none",
        ),
        SimulateOption(
            "chrome-trace",
            writable,
            None,
            "Write the step in Chrome's trace format into this file.",
            "FILE",
            "none",
        ),
        SimulateOption(
            "plot", picture, None, "Draw the step's HBM bandwidth over time into this file.", "FILE", "none"
        ),
        _JSON,
    ),
)

REPLAY = Question(
    "replay",
    "Play a trace of arrivals through the real scheduler on the virtual clock.",
    (
        *_MODEL,
        _SOCKETS,
        SimulateOption(
            "policy", one_of(PolicyName), PolicyName.SNAPSTREAM, "Cache policy.", choices(PolicyName)
        ),
        SimulateOption("num-slots", integer(1), 64, "Slots.", "N"),
        SimulateOption(
            "max-model-len", integer(1), 32768, "Longest sequence, prompt and answer together.", "TOKENS"
        ),
        SimulateOption(
            "trace",
            readable,
            None,
            "Arrivals: JSON lines (ours or Mooncake's) or BurstGPT's CSV.",
            "FILE",
            "they are drawn",
        ),
        SimulateOption(
            "shape", one_of(ShapeName), ShapeName.DAY, "Of drawn arrivals over time.", choices(ShapeName)
        ),
        SimulateOption("rate", above_zero, 1.0, "Mean of drawn arrivals a second.", "RATE"),
        SimulateOption("requests", integer(1), 86400, "Arrivals to draw.", "N"),
        SimulateOption("mean-prompt", integer(1), 1000, "Mean length of drawn prompts.", "TOKENS"),
        SimulateOption("mean-output", integer(1), 200, "Mean length of drawn answers.", "TOKENS"),
        SimulateOption("seed", integer(0), 0, "Of what is drawn.", "N"),
        SimulateOption("collapse", switch, True, "Take runs of equal decode steps at once.", ""),
        SimulateOption(
            "series", writable, None, "Write queue and slot use over time into this CSV file.", "FILE", "none"
        ),
        SimulateOption("plot", picture, None, "Draw the same into this file.", "FILE", "none"),
        _JSON,
    ),
)

REPRODUCE = Question(
    "reproduce",
    "Print every published figure beside ours.",
    (
        SimulateOption(
            "fit", switch, False, "Fit the parameters anew instead of taking those of the machine files.", ""
        ),
        SimulateOption("strict", switch, False, "Count figures that are known to be missed, too.", ""),
        SimulateOption(
            "plots", folder, None, "Draw the pictures of the docs into this folder.", "FOLDER", "none"
        ),
        _JSON,
    ),
)

QUESTIONS = (PLAN, SWEEP, STEP, REPLAY, REPRODUCE)


def options_tables() -> str:
    """Return the options of every question as Markdown."""
    return "\n".join(options_table(question.groups) for question in QUESTIONS)
