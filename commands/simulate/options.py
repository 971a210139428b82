"""Every option of `snapserve simulate`, by question."""

import enum
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from backends.options import Count, CountOrZero, OptionGroup, Shown, Tokens
from backends.sn40l.entry import MACHINE_TEXT, MODEL_TEXT, MachineName, ModelName
from backends.sn40l.step.deployment import Execution
from cache.policy import PolicyName
from cache.pool_options import KVCacheDtype
from commands.shared.option_types import OutputFile, Picture, PictureFolder
from commands.simulate.arrivals import ShapeName
from server.options.speculative_prefill import Keep
from server.options.types import InputFile

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), Shown("N", expected="a number above 0")]
_COUNTS = Shown("N,…", is_joined=True, expected="a whole number of at least 1, or several with commas")
_Limit = Annotated[_Positive | None, Shown("SECONDS", default="any")]
_Json = Annotated[bool, Shown(flag="json")]

PREFILL_CHUNK = 4096  # tokens; longer ones read an 8B, a 70B and DeepSeek-R1 at most 4 % faster


class WeightDtype(enum.StrEnum):
    """The type of linear layers' weights."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class SimulateGroup(OptionGroup):
    prefix: ClassVar[str] = "SNAPSERVE_SIMULATE_"

    as_json: _Json = False
    """Print JSON instead of text."""


class MachineOptions(SimulateGroup):
    """The machine, the model on it and its slots."""

    model: Annotated[ModelName, Field(description=MODEL_TEXT)] = "llama-3.1-8b"
    machine: Annotated[MachineName, Field(description=MACHINE_TEXT)] = "sn40l"
    weight_dtype: WeightDtype = WeightDtype.AUTO
    """Type of the linear layers' weights; auto: as the config.json says."""
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    """Type of keys and values in slots; int8, and fp8 on GPUs, take 0.52 of bfloat16's bytes."""
    uses_ddr: bool = False
    """Let weights that HBM cannot hold stream from DDR."""
    nodes: Count = 1
    """Nodes of these sockets, each with a share of the layers."""
    slots_in_ddr: bool = False
    """Let slots that HBM cannot hold stream from DDR."""
    slot_capacity: Count = 8192
    """Entries of a slot, of all policies but full and sparse."""


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


class ServingOptions(MachineOptions):
    """How a deployment serves, in `plan` and `replay`."""

    execution: Annotated[Execution | None, Shown(default="looped, or fused where the machine cannot")] = None
    """How layers are cut into kernel calls."""
    max_inter_token_latency: Annotated[_Positive, Shown("SECONDS")] = 0.2
    """As of the server: the longest time that reading prompts may take from a token."""
    prefill_chunk: Tokens = PREFILL_CHUNK
    """As of the server: prompt tokens read in one step, or a half, a quarter, down to a sixteenth of them."""
    paged: bool = False
    """Charge memory for the tokens that sequences hold on average, not for their slots."""
    mean_output: Count = 200
    """Mean length of drawn answers."""
    seed: CountOrZero = 0
    """Of what is drawn."""
    speculative_prefill_model: Annotated[ModelName | None, Shown(default="none: nothing is shortened")] = None
    """Small model on the same machine that reads long prompts first, and drops what is not needed."""
    speculative_prefill_threshold: Tokens = 4096
    """Tokens from which on a prompt is shortened."""
    speculative_prefill_keep: Keep = 0.25
    """What is kept of a prompt: a share of its chunks, or the most tokens that --model reads."""
    draft_model: Annotated[ModelName | None, Shown(default="none: no speculative decoding")] = None
    """Small model on the same machine that proposes tokens, which --model verifies. Needs --acceptance."""
    num_drafts: Count = 5
    """Tokens that it proposes a step."""
    acceptance: Annotated[
        float | None, Field(ge=0, lt=1), Shown("SHARE", default="none", expected="a share of 0 to below 1")
    ] = None
    """Probability that a proposed token is accepted."""
    trace: Annotated[InputFile | None, Shown(default="they are drawn")] = None
    """Arrivals: JSON lines (ours or Mooncake's), or CSV (BurstGPT's or Azure's)."""
    prefix_cache_bytes: Annotated[CountOrZero | None, Shown("BYTES", default="all of its DDR")] = None
    """DDR for the keys and values of prompts, where the trace's hash_ids say what prompts share."""
    other_models: Annotated[
        tuple[ModelName, ...],
        Shown("MODEL,…", default="none", is_joined=True, expected="a model, or several with commas"),
    ] = ()
    """Models that take turns with --model: HBM holds the weights of one, DDR those of all."""
    longest_turn: Annotated[_Positive, Shown("SECONDS")] = 1.0
    """Time after which a turn takes no new requests if other models have some."""


class PlanOptions(ManyDeploymentsOptions, ServingOptions):
    title: ClassVar[str] = "snapserve simulate plan"

    sockets: Annotated[
        tuple[Count, ...] | None, _COUNTS, Shown(default="the powers of two that the machine has")
    ] = None
    """Sockets to choose from."""
    context: Tokens = 32768
    """Longest sequence, prompt and answer together."""
    mean_prompt: Annotated[Count | None, Shown(default="the context less the answer")] = None
    """Length of the prompts."""
    rate: Annotated[_Positive | None, Shown("RATE", default="as many as one replica carries")] = None
    """Requests a second to carry, by as many replicas as it takes."""
    requests: Annotated[int, Field(ge=20), Shown("N", expected="a whole number of at least 20")] = 100
    """Fewest requests of a replay; more if more are under way at once."""
    max_ttft: _Limit = None
    """Longest time to the first token."""
    max_tpot: _Limit = None
    """Longest time per further token."""
    max_e2e: _Limit = None
    """Longest time from arrival to end."""
    percentile: Annotated[float, Field(gt=0, le=100), Shown("PERCENT", expected="above 0, up to 100")] = 90.0
    """Share of the requests that must keep each limit."""
    min_rate: Annotated[_Limit, Shown("RATE")] = None
    """Fewest output tokens a second, of one replica."""
    split: bool = False
    """Let other nodes of the same kind read the prompts."""
    tokens_per_step: Annotated[float, Field(ge=1, le=20), Shown("N", expected="from 1 to 20")] = 1.0
    """Tokens of a step that a paper assumes. It only enters a column of its own."""
    price: Annotated[_Positive | None, Shown("DOLLARS", default="the machine's")] = None
    """Price of a socket, an hour."""
    power: Annotated[_Positive | None, Shown("WATTS", default="the machine's")] = None
    """Power of a socket."""
    plot: Picture | None = None
    """Draw tokens/s for a user over tokens/s of a socket into this file."""
    kubernetes: OutputFile | None = None
    """Write the first one's replicas and options as a kustomization for deploy/kubernetes."""


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


class ReplayOptions(OneDeploymentOptions, ServingOptions):
    title: ClassVar[str] = "snapserve simulate replay"

    policy: PolicyName = PolicyName.SNAPSTREAM
    """Cache policy."""
    num_slots: Count = 64
    """Slots."""
    max_model_len: Tokens = 32768
    """Longest sequence, prompt and answer together."""
    shape: ShapeName = ShapeName.DAY
    """Of drawn arrivals over time."""
    rate: Annotated[_Positive, Shown("RATE")] = 1.0
    """Mean of drawn arrivals a second."""
    requests: Count = 86400
    """Arrivals to draw."""
    mean_prompt: Count = 1000
    """Mean length of drawn prompts."""
    varies: bool = True
    """Draw the lengths, too; otherwise all are the means."""
    collapse: bool = True
    """Take runs of equal decode steps at once."""
    range: bool = False
    """Replay twice more, with the unpublished number that changes most at the ends of its range."""
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


class MeasureOptions(SimulateGroup):
    title: ClassVar[str] = "snapserve simulate measure"

    repeats: Count = 10
    """Rounds in which each step runs; the median counts."""
    context: Annotated[int, Field(ge=2048, le=131072), Shown("N", expected="from 2048 to 131072")] = 4096
    """Tokens of the longest step."""
    compile: bool = True
    """Compile decode first, as the server does."""
    output: OutputFile | None = None
    """Write the machine file."""


@dataclass(frozen=True, slots=True)
class Question:
    """One sub-command of `snapserve simulate`."""

    name: str
    summary: str
    options: type[SimulateGroup]


QUESTIONS = (
    Question("plan", "Find the load that deployments carry within limits, by replays.", PlanOptions),
    Question("sweep", "Tabulate batch × context × sockets × policy × execution.", SweepOptions),
    Question("step", "Show one decode or prefill step kernel by kernel.", StepOptions),
    Question(
        "replay", "Play a trace of arrivals through the real scheduler on the virtual clock.", ReplayOptions
    ),
    Question("measure", "Measure this machine's constants with the torch backend.", MeasureOptions),
    Question(
        "reproduce",
        "Print every published figure beside ours; exit with 1 if a prediction failed.",
        ReproduceOptions,
    ),
)
