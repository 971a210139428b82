"""A public sweep of vLLM on single GPUs: so many requests at once, with their published lengths.

vLLM reads prompts first, as many in a batch as its limit of tokens allows, then decodes all. Steps shrink as
answers end.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any

from backends.sn40l.description.hardware import load_machine
from backends.sn40l.evidence.figures import Machines, Null, Value
from backends.sn40l.evidence.measures import model_of
from backends.sn40l.step.decode import decode_seconds
from backends.sn40l.step.deployment import DecodeShape, Deployment
from backends.sn40l.step.prefill import Chunk, prefill_seconds

_TITLES = {"h100": "H100", "a100-80gb": "A100 80 GB"}
_MODEL = "llama-3.1-8b"  # of the same shape as the Llama 3 8B that was measured
_MOST_BATCHED = 2048  # tokens of a prefill batch, vLLM's default for this context
_STRIDE = 32  # steps that are timed as the middle one of them


def values() -> dict[str, Value]:
    """Return our values by the figures' names."""
    return {_key(run): partial(_rate, run) for run in _answers()}


def nulls(published: Mapping[str, float]) -> dict[str, tuple[Null, ...]]:
    """Return what reading the weights alone gives, and what fewer requests do for the same machine.

    The weights are read at the peak bandwidth, and at the share of it that was fitted on another sweep.
    """
    found: dict[str, tuple[Null, ...]] = {}
    for run, answers in _answers().items():
        name, count = run.split()
        machine = load_machine(name)
        peak = sum(answers) * machine.hbm_bandwidth / (max(answers) * model_of(_MODEL).weight_bytes)
        found[_key(run)] = (
            ("weights at peak bandwidth", peak),
            (f"weights at {machine.stream_efficiency:g} of peak bandwidth", peak * machine.stream_efficiency),
        )
        if count != "10":
            few = published[_key(f"{name} 10")]
            found[_key(run)] += (
                ("the rate of 10 requests", few),
                ("in proportion to requests", few * int(count) / 10),
            )
        if int(count) > 40:
            start, end = (sum(_answers()[one]) / published[_key(one)] for one in (f"{name} 10", f"{name} 40"))
            seconds = end + (end - start) / 30 * (int(count) - 40)
            found[_key(run)] += (("the line through 10 and 40 requests", sum(answers) / seconds),)
    return found


def _key(run: str) -> str:
    name, count = run.split()
    return f"8B by vLLM on one {_TITLES[name]}, {count} requests"


@cache
def _file() -> dict[str, Any]:
    return json.loads(files(__package__).joinpath("data", "vllm_lengths.json").read_text())  # type: ignore[no-any-return]


def _answers() -> dict[str, list[int]]:
    """Return the numbers of output tokens of each run."""
    answers: dict[str, list[int]] = _file()["answers"]
    return answers


def _rate(run: str, machines: Machines) -> float:
    """Return output tokens/s from the first request's arrival to the last one's end."""
    answers = _answers()[run]
    prompts = _file()["prompts"][: len(answers)]
    deployment = Deployment(model_of(_MODEL), machines[run.split()[0]], 1)
    reading = sum(prefill_seconds(deployment, Chunk(size)) for size in _packed(prompts))
    decoding = 0.0
    for start in range(1, max(answers), _STRIDE):
        size = min(_STRIDE, max(answers) - start)
        middle = start + size // 2
        live = [prompt + middle for prompt, answer in zip(prompts, answers, strict=True) if answer > middle]
        entries = round(statistics.fmean(live)) if live else 1
        decoding += size * decode_seconds(deployment, DecodeShape(max(1, len(live)), entries))
    return sum(answers) / (reading + decoding)


def _packed(prompts: Sequence[int]) -> Iterator[int]:
    """Yield the tokens of each batch of prompts."""
    total = 0
    for size in prompts:
        if total + size > _MOST_BATCHED:
            yield total
            total = 0
        total += size
    yield total
