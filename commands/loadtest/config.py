"""Every option of `snapserve bench`, and the configuration that they make.

Flags are named as in `vllm bench serve` where it has them.
"""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from backends.options import Count, CountOrZero, OptionGroup, Seconds, Shown, Text, Tokens
from commands.shared.option_types import AnyFile, ApiKey, JsonFile, Picture, Url, is_printable
from server.options.command_line import OptionError, read_options


class PromptFormat(StrEnum):
    AUTO = "auto"  # token ids where every server takes them
    TOKENS = "tokens"
    TEXT = "text"


class DatasetName(StrEnum):
    RANDOM = "random"
    PREFIX_REPETITION = "prefix_repetition"  # prompts that share their beginnings


def _path(value: str) -> str:
    is_path = value.startswith("/") and value.endswith("completions")
    if not is_path or " " in value or not is_printable(value):
        raise ValueError("a path like /v1/completions or /v1/chat/completions")
    return value


def _json_object(value: object) -> Any:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError("a JSON object")
    return parsed


_Percentile = Annotated[float, Field(ge=0, le=100)]
_Positive = Annotated[float, Field(gt=0), Shown(expected="a number above 0")]


class BenchGroup(OptionGroup):
    prefix: ClassVar[str] = "SNAPSERVE_BENCH_"


class TargetOptions(BenchGroup):
    """The servers."""

    title: ClassVar[str] = "Server"

    base_url: Url = "http://127.0.0.1:8000"
    """Server to load."""
    endpoint: Annotated[str, AfterValidator(_path), Shown("PATH")] = "/v1/completions"
    """Path to call, of text or of chat completions."""
    model: Annotated[Text | None, Shown("NAME", default="the first that the server lists")] = None
    """Model to request."""
    api_key: ApiKey | None = None
    """Key to send."""
    extra_body: Annotated[dict[str, Any] | None, BeforeValidator(_json_object), Shown("JSON")] = None
    """Fields to add to every request, or to put in place of ours; null takes one out."""
    compare: Url | None = None
    """Second server; the two are loaded in turns."""
    compare_model: Annotated[Text | None, Shown("NAME", default="the first that it lists")] = None
    """Model to request of the second server."""
    rounds: Count = 3
    """Turns that each of two servers gets."""


class Load(BenchGroup):
    """What is sent and when."""

    title: ClassVar[str] = "Prompts and load"

    num_prompts: Count = 100
    """Requests of a run."""
    input_len: Annotated[Tokens, Shown(flag="random-input-len")] = 1024
    """Tokens of a random prompt."""
    output_len: Annotated[Tokens, Shown(flag="random-output-len")] = 128
    """Most tokens of an answer."""
    range_ratio: Annotated[
        float,
        Field(ge=0, lt=1),
        Shown("RATIO", flag="random-range-ratio", expected="a number from 0 to below 1"),
    ] = 0.0
    """Both lengths vary, evenly, by this share to either side of themselves."""
    vocab_size: Annotated[int, Field(ge=512), Shown("N", flag="random-vocab-size")] = 2000
    """Random token ids are drawn from 256 up to this one."""
    prompt_format: PromptFormat = PromptFormat.AUTO
    """How random prompts are sent; auto is as token ids where the servers take them, otherwise as words."""
    dataset_name: DatasetName = DatasetName.RANDOM
    """Prompts: random ones, or groups of random ones with the same beginning."""
    repeated_len: Annotated[Tokens, Shown(flag="prefix-repetition-prefix-len")] = 256
    """Tokens of a beginning that prompts share."""
    suffix_len: Annotated[Tokens, Shown(flag="prefix-repetition-suffix-len")] = 256
    """Tokens of a prompt behind it."""
    num_prefixes: Annotated[Count, Shown(flag="prefix-repetition-num-prefixes")] = 10
    """Beginnings, each shared by an equal part of the prompts."""
    repetition_output_len: Annotated[Tokens, Shown(flag="prefix-repetition-output-len")] = 128
    """Most tokens of an answer to them."""
    dataset_path: AnyFile | None = None
    """File of prompts to send instead of random ones: one a line, or a .jsonl file of objects with a
    `prompt`."""
    ignore_eos: bool = False
    """Request answers of full length, even where the model would end them."""
    seed: CountOrZero = 0
    """Of prompts, lengths and arrivals."""
    max_concurrency: Annotated[Count | None, Shown(default="no limit")] = None
    """Most requests that run at once."""
    request_rate: Annotated[_Positive, Shown("RATE")] = math.inf
    """Requests that arrive in a second; inf for all at once."""
    burstiness: Annotated[_Positive, Shown("SHAPE")] = 1.0
    """Shape of the gamma distribution of gaps between arrivals: 1 is a Poisson process, less is burstier."""
    num_warmups: CountOrZero = 0
    """Requests that are sent before each run and not counted."""
    timeout: Seconds = 3600.0
    """Longest time of a run; requests unfinished by then have failed."""


class ReportOptions(BenchGroup):
    """What is written."""

    title: ClassVar[str] = "Report"

    metric_percentiles: Annotated[
        tuple[_Percentile, ...],
        Shown(
            "P,…",
            default="90,99",
            expected="percentiles between 0 and 100, separated by commas",
            is_joined=True,
        ),
    ] = (90.0, 99.0)
    """Percentiles of each latency, with commas."""
    json_path: JsonFile | None = None
    """File for the results as JSON; - for the standard output."""
    plot: Picture | None = None
    """File for a plot of the latencies: .png, .svg or .pdf. Needs matplotlib."""
    allow_failures: bool = False
    """End with status 0 even if requests have failed."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    target: TargetOptions
    load: Load
    report: ReportOptions


@dataclass(frozen=True, slots=True)
class Address:
    """A server and what is requested of it. `model` None is the first one that it lists."""

    base_url: str
    endpoint: str = "/v1/completions"
    model: str | None = None
    api_key: str | None = None
    extra_body: Mapping[str, Any] | None = None

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("chat/completions")

    @property
    def models_path(self) -> str:
        """The list of models, beside the endpoint."""
        return self.endpoint.removesuffix("completions").removesuffix("chat/") + "models"


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The configuration of `snapserve bench`."""

    base: Address
    compare: Address | None
    rounds: int
    load: Load
    percentiles: tuple[float, ...]
    json_path: str | None
    plot_path: Path | None
    failures_are_allowed: bool


def read_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> BenchConfig:
    """Return the configuration that flags and environment make. Raises `OptionError`."""
    options = read_options(BenchOptions, arguments, environment)
    target = options.target
    base = Address(target.base_url, target.endpoint, target.model, target.api_key, target.extra_body)
    if base.is_chat and options.load.prompt_format is PromptFormat.TOKENS:
        raise OptionError(
            f"--prompt-format tokens does not go with --endpoint {base.endpoint}: a chat's messages are text"
        )
    compare = None
    if target.compare is not None:
        compare = Address(target.compare, base.endpoint, target.compare_model, base.api_key, base.extra_body)
    return BenchConfig(
        base=base,
        compare=compare,
        rounds=target.rounds,
        load=options.load,
        percentiles=options.report.metric_percentiles,
        json_path=options.report.json_path,
        plot_path=options.report.plot,
        failures_are_allowed=options.report.allow_failures,
    )
