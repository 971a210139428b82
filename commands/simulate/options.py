"""Every option of `snapserve simulate`, by question.

`python -m commands.simulate` prints the tables of the reference.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from backends.options import Count, CountOrZero, OptionGroup, Shown, Tokens
from backends.sn40l.deployment import Execution
from backends.sn40l.entry import MACHINE_TEXT, MODEL_TEXT, MachineName, ModelName
from cache.policy import PolicyName
from commands.simulate.arrivals import ShapeName
from server.options.command_line import options_table
from server.options.types import InputFile, OutputFile, Picture, PictureFolder

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), Shown("N", expected="a number above 0")]
_COUNTS = Shown("N,…", is_joined=True, expected="a whole number of at least 1, or several with commas")
_Limit = Annotated[_Positive | None, Shown("SECONDS", default="any")]
_Json = Annotated[bool, Shown(flag="json")]


class SimulateGroup(OptionGroup):
    prefix: ClassVar[str] = "SNAPSERVE_SIMULATE_"

    as_json: _Json = False
    """Print JSON instead of text."""


class MachineOptions(SimulateGroup):
    """The machine, the model on it and its slots."""

    model: Annotated[ModelName, Field(description=MODEL_TEXT)] = "llama-3.1-8b"
    machine: Annotated[MachineName, Field(description=MACHINE_TEXT)] = "sn40l"
    uses_ddr: bool = False
    """Let weights that HBM cannot hold stream from DDR."""
    slot_capacity: Count = 8192
    """Entries of a slot, of all policies but full."""


class OneDeploymentOptions(MachineOptions):
    """One number of sockets."""

    sockets: Annotated[Count | None, Shown(default="all")] = None
    """Sockets of the machine."""


class ManyDeploymentsOptions(MachineOptions):
    """Several policies side by side."""

    policy: Annotated[
        tuple[PolicyName, ...],
        Shown(
            "POLICY,…",
            default="full,snapstream",
            is_joined=True,
            expected=f"one of {', '.join(PolicyName)}, or several with commas",
        ),
    ] = (PolicyName.FULL, PolicyName.SNAPSTREAM)
    """Cache policies."""


class PlanOptions(ManyDeploymentsOptions):
    title: ClassVar[str] = "snapserve simulate plan"

    sockets: Annotated[
        tuple[Count, ...] | None, _COUNTS, Shown(default="the powers of two that the machine has")
    ] = None
    """Sockets to choose from."""
    context: Tokens = 32768
    """Tokens of a sequence; TTFT is that of a prompt as long."""
    max_ttft: _Limit = None
    """Longest time to the first token."""
    max_tpot: _Limit = None
    """Longest time of a decode step."""
    min_rate: Annotated[_Limit, Shown("RATE")] = None
    """Fewest tokens a second, of the whole node."""


class SweepOptions(ManyDeploymentsOptions):
    title: ClassVar[str] = "snapserve simulate sweep"

    batches: Annotated[tuple[Count, ...], _COUNTS, Shown(default="1,4,16,64")] = (1, 4, 16, 64)
    """Slots."""
    contexts: Annotated[tuple[Count, ...], _COUNTS, Shown("TOKENS,…", default="8192,32768,131072")] = (
        8192,
        32768,
        131072,
    )
    """Tokens."""
    sockets: Annotated[tuple[Count, ...] | None, _COUNTS, Shown(default="half of them, and all")] = None
    """Sockets."""
    executions: Annotated[
        tuple[Execution, ...] | None,
        Shown(
            "EXECUTION,…",
            default="fused, and looped where the machine supports it",
            is_joined=True,
            expected=f"one of {', '.join(Execution)}, or several with commas",
        ),
        Field(description=f"Ways of cutting layers into kernel calls: {', '.join(Execution)}."),
    ] = None
    plot: Picture | None = None
    """Draw tokens/s over batch into this file."""


class StepOptions(OneDeploymentOptions):
    title: ClassVar[str] = "snapserve simulate step"

    batch: Count = 1
    """Slots."""
    execution: Execution = Execution.FUSED
    """How layers are cut into kernel calls."""
    prefill: Tokens | None = None
    """Tokens of a prompt to read, instead of a decode step."""
    chrome_trace: OutputFile | None = None
    """Write the step in Chrome's trace format into this file."""
    plot: Picture | None = None
    """Draw the step's HBM bandwidth over time into this file."""


class ReplayOptions(OneDeploymentOptions):
    title: ClassVar[str] = "snapserve simulate replay"

    policy: PolicyName = PolicyName.SNAPSTREAM
    """Cache policy."""
    num_slots: Count = 64
    """Slots."""
    max_model_len: Tokens = 32768
    """Longest sequence, prompt and answer together."""
    trace: Annotated[InputFile | None, Shown(default="they are drawn")] = None
    """Arrivals: JSON lines (ours or Mooncake's) or BurstGPT's CSV."""
    shape: ShapeName = ShapeName.DAY
    """Of drawn arrivals over time."""
    rate: Annotated[_Positive, Shown("RATE")] = 1.0
    """Mean of drawn arrivals a second."""
    requests: Count = 86400
    """Arrivals to draw."""
    mean_prompt: Count = 1000
    """Mean length of drawn prompts."""
    mean_output: Count = 200
    """Mean length of drawn answers."""
    seed: CountOrZero = 0
    """Of what is drawn."""
    collapse: bool = True
    """Take runs of equal decode steps at once."""
    series: OutputFile | None = None
    """Write queue and slot use over time into this CSV file."""
    plot: Picture | None = None
    """Draw the same into this file."""


class ReproduceOptions(SimulateGroup):
    title: ClassVar[str] = "snapserve simulate reproduce"

    fit: bool = False
    """Fit the parameters again instead of using those of the machine files."""
    plots: PictureFolder | None = None
    """Draw the pictures of the docs into this folder."""


@dataclass(frozen=True, slots=True)
class Question:
    """One sub-command of `snapserve simulate`."""

    name: str
    summary: str
    options: type[SimulateGroup]


QUESTIONS = (
    Question("plan", "Find the cheapest deployment that meets a service level.", PlanOptions),
    Question("sweep", "Tabulate batch × context × sockets × policy × execution.", SweepOptions),
    Question("step", "Show one decode or prefill step kernel by kernel.", StepOptions),
    Question(
        "replay", "Play a trace of arrivals through the real scheduler on the virtual clock.", ReplayOptions
    ),
    Question(
        "reproduce",
        "Print every published figure beside ours; exit with 1 if a prediction failed.",
        ReproduceOptions,
    ),
)


def options_tables() -> str:
    """Return the options of every question as Markdown."""
    return options_table(question.options for question in QUESTIONS)
