"""The quantities of published figures, computed by this model.

Models are given by name. The defaults of decode are batch 1 and a context of 4k.
"""

from dataclasses import dataclass
from functools import lru_cache

from backends.sn40l.description.hardware import Machine
from backends.sn40l.description.model_config import Model, load_model
from backends.sn40l.step.decode import decode_seconds, decode_step
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.kernels import Step
from backends.sn40l.step.placement import max_batch
from backends.sn40l.step.prefill import Chunk, Compression, prefill_seconds, prefill_step

MULTI_TOKEN = 2.4  # the factor in every throughput of table 5: multi-token prediction assumed, not measured


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of SnapStream's table 5: slots of so many entries."""

    label: str
    entries: int
    batch: int


TABLE_5 = (  # without and with SnapStream
    (Cell("R1 128k full", 131072, 16), Cell("R1 128k→32k", 32768, 64)),
    (Cell("R1 64k full", 65536, 32), Cell("R1 64k→16k", 16384, 128)),
    (Cell("R1 32k full", 32768, 64), Cell("R1 32k→8k", 8192, 256)),
)
EXPERT_LAYER = ("projections", "attention", "output", "router", "experts", "selection", "ring")
"""The kernels of SnapStream's table 4."""
_NUM_AHEAD = 8  # tokens of a draft whose attention scores a prompt, arXiv 2603.02631
LISTED_MODELS = (
    "gpt-oss-120b",
    "deepseek-r1",
    "llama-4-maverick",
    "llama-4-scout",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "mixtral-8x7b",
    "qwen2.5-7b",
    "qwen2.5-72b",
)
DENSE_MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen2.5-7b", "qwen2.5-72b")


@lru_cache(maxsize=64)
def model_of(name: str) -> Model:
    """Return a model that ships."""
    return load_model(name)


def decode_of(
    machine: Machine, name: str, sockets: int, execution: Execution, batch: int = 1, context: int = 4096
) -> Step:
    """Return a decode step."""
    return decode_step(Deployment(model_of(name), machine, sockets, execution), DecodeShape(batch, context))


@lru_cache(maxsize=65536)
def seconds_of(
    machine: Machine, name: str, sockets: int, execution: Execution, batch: int = 1, context: int = 4096
) -> float:
    """Return the seconds of a decode step. Figures share them, so they are kept."""
    return decode_seconds(
        Deployment(model_of(name), machine, sockets, execution), DecodeShape(batch, context)
    )


def rate_of(machine: Machine, name: str, sockets: int, execution: Execution, context: int = 4096) -> float:
    """Return tokens/s of one sequence."""
    return 1 / seconds_of(machine, name, sockets, execution, context=context)


def token_bytes(model: Model, context: int) -> float:
    """Return the bytes of all weights and of one sequence's cache."""
    return model.weight_bytes + model.cache_bytes(context)


def roofline(machine: Machine, model: Model, sockets: int, context: int) -> float:
    """Return tokens/s of a dense model at batch 1 if its weights and cache were read at peak bandwidth.

    This is the sources' equation.
    """
    return sockets * machine.hbm_bandwidth / token_bytes(model, context)


def attained(machine: Machine, name: str, sockets: int, execution: Execution, context: int = 4096) -> float:
    """Return the share of its roofline that a dense model reaches at batch 1, in percent."""
    return (
        100
        * rate_of(machine, name, sockets, execution, context)
        / roofline(machine, model_of(name), sockets, context)
    )


def looping_gain(machine: Machine, name: str, sockets: int = 16) -> float:
    """Return how many times faster a token is when the layers are looped."""
    return rate_of(machine, name, sockets, Execution.LOOPED) / rate_of(
        machine, name, sockets, Execution.FUSED
    )


def table_5_rate(machine: Machine, batch: int, capacity: int) -> float:
    """Return tokens/s of DeepSeek-R1 on 16 sockets, with the paper's factor for multi-token prediction."""
    return MULTI_TOKEN * batch / seconds_of(machine, "deepseek-r1", 16, Execution.FUSED, batch, capacity)


def table_5_batch(machine: Machine, capacity: int) -> int:
    """Return the largest batch of DeepSeek-R1 on 16 sockets."""
    return max_batch(Deployment(model_of("deepseek-r1"), machine, 16), DecodeShape(1, capacity))


def r1_prefill(machine: Machine, num_tokens: int, compression: Compression | None = None) -> Step:
    """Return the prefill of one prompt by DeepSeek-R1 on 16 sockets."""
    return prefill_step(
        Deployment(model_of("deepseek-r1"), machine, 16), Chunk(num_tokens, compression=compression)
    )


def drafted_prefill(machine: Machine, draft: str, num_tokens: int, num_kept: int) -> float:
    """Return the seconds in which a draft scores a prompt and DeepSeek-R1 reads what is kept of it.

    Both are on 16 sockets. The draft looks `_NUM_AHEAD` tokens ahead.
    """
    deployment = Deployment(model_of(draft), machine, 16)
    scoring = Chunk(num_tokens, compression=Compression(0, 0, _NUM_AHEAD))
    ahead = (_NUM_AHEAD - 1) * seconds_of(machine, draft, 16, Execution.FUSED, context=num_tokens)
    return prefill_seconds(deployment, scoring) + ahead + r1_prefill(machine, num_kept).seconds


def expert_layer_shares(machine: Machine) -> dict[str, float]:
    """Return the shares of one expert layer's prefill of DeepSeek-R1 at 128k on 16 sockets, in percent."""
    step = r1_prefill(machine, 131072, Compression(16384, 16384))
    kernels = [event for event in step.events if event.kernel][
        -8:-1
    ]  # the last layer, without the classifier
    total = sum(event.end - event.start for event in kernels)
    return {event.name: 100 * (event.end - event.start) / total for event in kernels}
