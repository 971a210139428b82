"""Every option of `snapserve bench`, and the configuration that they make. Flags are named as in `vllm bench serve` where it has them."""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from server.options.option import (
    Option,
    OptionError,
    OptionGroup,
    choices,
    integer,
    one_of,
    resolve_options,
    seconds,
    switch,
    text,
)
from server.options.paths import picture, writable_or_output

BENCH_PREFIX = "SNAPSERVE_BENCH_"


class BenchOption(Option):
    """An option whose variable is apart from those of `serve`, which has options of the same names."""

    __slots__ = ()

    @property
    def variable(self) -> str:
        return BENCH_PREFIX + self.key.upper()


class PromptFormat(StrEnum):
    AUTO = "auto"  # token ids where every server takes them
    TOKENS = "tokens"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent and when. Requests a second are infinite for all at once; `timeout` is the longest time of a run in seconds."""

    num_prompts: int = 100
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    vocab_size: int = 2000
    prompt_format: PromptFormat = PromptFormat.AUTO
    dataset_path: Path | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    ignore_eos: bool = False
    seed: int = 0
    timeout: float = 3600.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is and what to ask of it. `model` None is the first one that it lists."""

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
    """Everything that `snapserve bench` was told, resolved."""

    base: Address
    compare: Address | None
    rounds: int
    load: Load
    percentiles: tuple[float, ...]
    json_path: str | None
    plot_path: Path | None
    failures_are_allowed: bool


def number_above(least: float) -> Any:
    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not number > least:
            raise ValueError(f"a number above {least:g}")
        return number

    return parse


def ratio(value: str) -> float:
    number = number_above(-1)(value)
    if not 0 <= number < 1:
        raise ValueError("a number from 0 to below 1")
    return float(number)


def percentiles(value: str) -> tuple[float, ...]:
    message = "percentiles between 0 and 100, separated by commas"
    try:
        numbers = tuple(float(item) for item in value.split(","))
    except ValueError as error:
        raise ValueError(message) from error
    if not all(0 <= number <= 100 for number in numbers):
        raise ValueError(message)
    return numbers


def url(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_fit = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_fit = False
    if not is_fit:
        raise ValueError("a URL like http://127.0.0.1:8000")
    return value.rstrip("/")


def key(value: str) -> str:
    if not _is_printable(value) or not value.strip():
        raise ValueError("printable ASCII")
    return value


def path(value: str) -> str:
    if (
        not value.startswith("/")
        or not value.endswith("completions")
        or " " in value
        or not _is_printable(value)
    ):
        raise ValueError("a path like /v1/completions or /v1/chat/completions")
    return value


def json_object(value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError("a JSON object")
    return parsed


def _is_printable(value: str) -> bool:
    return value.isascii() and value.isprintable()


_LOAD = Load()

TARGET = OptionGroup(
    "Server",
    (
        BenchOption("base-url", url, "http://127.0.0.1:8000", "Server to load.", "URL"),
        BenchOption(
            "endpoint", path, "/v1/completions", "Path to call, of text or of chat completions.", "PATH"
        ),
        BenchOption("model", text, None, "Model to ask for.", "NAME", "the first that the server lists"),
        BenchOption("api-key", key, None, "Key to send.", "KEY", "none"),
        BenchOption(
            "extra-body",
            json_object,
            None,
            "Fields to add to every request, or to put in place of ours; null takes one out.",
            "JSON",
            "none",
        ),
        BenchOption("compare", url, None, "Second server; the two are loaded in turns.", "URL", "none"),
        BenchOption(
            "compare-model",
            text,
            None,
            "Model to ask the second server for.",
            "NAME",
            "the first that it lists",
        ),
        BenchOption("rounds", integer(1), 3, "Turns that each of two servers gets.", "N"),
    ),
)

PROMPTS = OptionGroup(
    "Prompts",
    (
        BenchOption("num-prompts", integer(1), _LOAD.num_prompts, "Requests of a run.", "N"),
        BenchOption("random-input-len", integer(1), _LOAD.input_len, "Tokens of a random prompt.", "TOKENS"),
        BenchOption("random-output-len", integer(1), _LOAD.output_len, "Most tokens of an answer.", "TOKENS"),
        BenchOption(
            "random-range-ratio",
            ratio,
            _LOAD.range_ratio,
            "Both lengths vary, evenly, by this share to either side of themselves.",
            "RATIO",
        ),
        BenchOption(
            "random-vocab-size",
            integer(512),
            _LOAD.vocab_size,
            "Random token ids are drawn from 256 up to this one.",
            "N",
        ),
        BenchOption(
            "prompt-format",
            one_of(PromptFormat),
            _LOAD.prompt_format,
            "How random prompts are sent; auto is as token ids where the servers take them, otherwise as words.",
            choices(PromptFormat),
        ),
        BenchOption(
            "dataset-path",
            text,
            None,
            "File of prompts to send instead of random ones: one a line, or a .jsonl file of objects with a `prompt`.",
            "FILE",
            "none",
        ),
        BenchOption(
            "ignore-eos",
            switch,
            _LOAD.ignore_eos,
            "Ask for answers of full length, whatever the model says.",
            "",
        ),
        BenchOption("seed", integer(0), _LOAD.seed, "Of prompts, lengths and arrivals.", "N"),
    ),
)

LOAD = OptionGroup(
    "Load",
    (
        BenchOption(
            "max-concurrency",
            integer(1),
            None,
            "Requests that are under way at once, at most.",
            "N",
            "no limit",
        ),
        BenchOption(
            "request-rate",
            number_above(0),
            _LOAD.request_rate,
            "Requests that arrive in a second; inf for all at once.",
            "RATE",
        ),
        BenchOption(
            "burstiness",
            number_above(0),
            _LOAD.burstiness,
            "Shape of the gamma distribution of gaps between arrivals: 1 is a Poisson process, less is burstier.",
            "SHAPE",
        ),
        BenchOption(
            "num-warmups",
            integer(0),
            _LOAD.num_warmups,
            "Requests that are sent before each run and not counted.",
            "N",
        ),
        BenchOption(
            "timeout",
            seconds,
            _LOAD.timeout,
            "Longest time of a run; requests unfinished by then have failed.",
            "SECONDS",
        ),
    ),
)

REPORT = OptionGroup(
    "Report",
    (
        BenchOption(
            "metric-percentiles",
            percentiles,
            (90.0, 99.0),
            "Percentiles of each latency, with commas.",
            "P,…",
            "90,99",
        ),
        BenchOption(
            "json",
            writable_or_output,
            None,
            "File for the results as JSON; - for the standard output.",
            "FILE",
            "none",
        ),
        BenchOption(
            "plot",
            picture,
            None,
            "File for a plot of the latencies: .png, .svg or .pdf. Needs matplotlib.",
            "FILE",
            "none",
        ),
        BenchOption("allow-failures", switch, False, "End with status 0 even if requests have failed.", ""),
    ),
)

GROUPS = (TARGET, PROMPTS, LOAD, REPORT)


def read_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> BenchConfig:
    """Return the configuration that flags and environment make. Raises `OptionError`."""
    values = resolve_options(GROUPS, arguments, environment)
    base = Address(
        values["base_url"], values["endpoint"], values["model"], values["api_key"], values["extra_body"]
    )
    if base.is_chat and values["prompt_format"] is PromptFormat.TOKENS:
        raise OptionError(
            f"--prompt-format tokens does not go with --endpoint {base.endpoint}: a chat's messages are text"
        )
    compare = values["compare"]
    return BenchConfig(
        base=base,
        compare=compare
        and Address(compare, base.endpoint, values["compare_model"], base.api_key, base.extra_body),
        rounds=values["rounds"],
        load=_load(values),
        percentiles=values["metric_percentiles"],
        json_path=values["json"],
        plot_path=values["plot"],
        failures_are_allowed=values["allow_failures"],
    )


def _load(values: Mapping[str, Any]) -> Load:
    return Load(
        num_prompts=values["num_prompts"],
        input_len=values["random_input_len"],
        output_len=values["random_output_len"],
        range_ratio=values["random_range_ratio"],
        vocab_size=values["random_vocab_size"],
        prompt_format=values["prompt_format"],
        dataset_path=values["dataset_path"] and Path(values["dataset_path"]),
        request_rate=values["request_rate"],
        burstiness=values["burstiness"],
        max_concurrency=values["max_concurrency"],
        num_warmups=values["num_warmups"],
        ignore_eos=values["ignore_eos"],
        seed=values["seed"],
        timeout=values["timeout"],
    )
