"""Every option of `snapserve serve`, and the configuration that they make: one frozen dataclass for each floor, composed and checked.

The one place where flags and environment variables get their meaning. `python -m server.options.config` prints the tables of
`docs/configuration.md`.
"""

import argparse
import enum
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from backends.interface import PromptPooling
from backends.sn40l.backend import SimulationConfig
from backends.torch_backend.config import (
    DEFAULT_COMPILE_CACHE,
    DEFAULT_MAX_MODEL_LEN,
    DeviceName,
    DtypeName,
    Quantization,
    TorchBackendConfig,
)
from scheduler.config import SchedulerConfig
from scheduler.waiting import QueueOrder
from server.logs import LogFormat
from server.options.connections import CONNECTIONS, connection_limits_of
from server.options.keys import key_name, read_key_file
from server.options.option import (
    Option,
    OptionError,
    OptionGroup,
    choices,
    integer,
    one_of,
    options_table,
    origin,
    resolve_options,
    seconds,
    switch,
    text,
)
from server.options.pools import SHORT
from server.options.scheduling import SCHEDULING, scheduler_config_of
from server.options.settings import (
    BatchSettings,
    Limits,
    RateLimit,
    ReasoningParserName,
    ServerSettings,
    StorageLimits,
    ToolParserName,
)
from server.options.simulation import SIMULATION, simulation_of
from server.options.slots import ONE_POOL, pools_of

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
DEMO_MODEL_NAME = "snapserve-demo"


class BackendName(enum.StrEnum):
    TORCH = "torch"
    FAKE = "fake"  # no model: made-up tokens at once, for tests of clients
    SN40L = "sn40l"  # tokens of another backend, in the time of a simulated machine


class LogLevel(enum.StrEnum):
    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Where the process listens, how it speaks and how it ends; times in seconds."""

    host: str
    port: int
    log_level: LogLevel
    log_format: LogFormat
    is_traced: bool
    otlp_endpoint: str | None
    drain_timeout: float
    stall_timeout: float


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that `snapserve serve` was told, resolved. The fake backend takes its sizes from `backend` too.

    With a `simulation`, `backend_name` is that of the backend whose tokens it answers with.
    """

    backend_name: BackendName
    backend: TorchBackendConfig
    scheduler: SchedulerConfig
    server: ServerSettings
    process: ProcessConfig
    simulation: SimulationConfig | None = None


def model(value: str) -> str:
    """Return a hub id, or the path of a folder that is there."""
    if not value or (value.startswith(("/", ".", "~")) and not Path(value).is_dir()):
        raise ValueError("a hub id or a folder that exists")
    return value


def folder(value: str) -> Path:
    """Return the path of a folder, which need not be there yet."""
    return Path(text(value)).expanduser()


_LIMITS = Limits()
TRACE_VARIABLES = frozenset({"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"})
_BATCHES = BatchSettings(Path())
_STORAGE = StorageLimits()


MODEL = OptionGroup(
    "Model",
    (
        Option(
            "model",
            model,
            str(DEMO_MODEL),
            "Local folder or hub id of a Hugging Face model.",
            "MODEL",
            "the demo model",
        ),
        Option(
            "served-model-name",
            text,
            (),
            "Names that requests may give; answers carry the first. `*` accepts any.",
            "NAME",
            f"{DEMO_MODEL_NAME} for the demo model, otherwise what --model says",
            is_list=True,
        ),
        Option(
            "backend",
            one_of(BackendName),
            BackendName.TORCH,
            "What turns batches into tokens.",
            choices(BackendName),
        ),
        Option("device", one_of(DeviceName), DeviceName.AUTO, "Where the model runs.", choices(DeviceName)),
        Option(
            "dtype",
            one_of(DtypeName),
            DtypeName.AUTO,
            "Type of weights and cache; auto is the checkpoint's own.",
            choices(DtypeName),
        ),
        Option(
            "quantization",
            one_of(Quantization),
            Quantization.NONE,
            "How linear layers work: int8 halves their weights, w8a8 multiplies in int8 too. What they cost: performance.md.",
            choices(Quantization),
        ),
        Option(
            "max-model-len",
            integer(1),
            None,
            "Most tokens of a sequence, prompt and answer together.",
            "TOKENS",
            f"the model's own limit, at most {DEFAULT_MAX_MODEL_LEN}",
        ),
    ),
)

CACHE = OptionGroup(
    "Cache",
    (
        Option(
            "pool",
            text,
            (),
            "Several pools instead of one: the policy of each, and by their names any of the options for slots (short: "
            f"{', '.join(f'`{short}`' for short in SHORT)}); `name` if two have one policy. In the variable separated by spaces.",
            "POLICY[:KEY=VALUE,…]",
            "one, of the options for slots",
            is_list=True,
            separator=None,
        ),
        Option("num-scratch", integer(1), 2, "Prompts longer than a slot that are read at once.", "N"),
        Option(
            "scratch-capacity",
            integer(1),
            None,
            "Tokens of a prompt that are held while it is read; of a longer one, the least needed are given up on the way.",
            "N",
            "all",
        ),
        Option("prefill-chunk", integer(1), 512, "Prompt tokens read in one step.", "TOKENS"),
    ),
)

CODE = OptionGroup(
    "Compiled code",
    (
        Option(
            "compile",
            switch,
            True,
            "Whether decode steps run as CUDA graphs on a GPU, captured before the server is ready, and on a CPU as code compiled "
            "for it, in the background.",
            "",
        ),
        Option(
            "compile-cache",
            folder,
            DEFAULT_COMPILE_CACHE,
            "Where the code for the CPU is kept.",
            "FOLDER",
            "~/.cache/snapserve",
        ),
    ),
)

SERVER = OptionGroup(
    "Server",
    (
        Option("host", text, "127.0.0.1", "Address to listen on; 0.0.0.0 for all.", "ADDRESS"),
        Option("port", integer(0, 65535), 8000, "Port to listen on; 0 for a free one.", "PORT"),
        Option(
            "api-key",
            text,
            (),
            "Keys of which requests must give one; prefer the file or the variable.",
            "KEY",
            "none",
            is_list=True,
        ),
        Option(
            "api-key-file",
            text,
            None,
            "File with one key a line, which `requests=N` and `tokens=N` may follow: its own limits a minute. Lines with # are comments.",
            "FILE",
            "none",
        ),
        Option(
            "allowed-origins",
            origin,
            (),
            "Sites whose pages may call the server from a browser (CORS): https://example.com, or * for all.",
            "ORIGIN",
            "none",
            is_list=True,
        ),
        Option(
            "rate-limit-requests",
            integer(1),
            None,
            "Requests that one key may send a minute; more get a 429.",
            "N",
            "none",
        ),
        Option(
            "rate-limit-tokens",
            integer(1),
            None,
            "Tokens of prompts and answers that one key may use a minute.",
            "N",
            "none",
        ),
        Option(
            "metrics-require-key", switch, True, "Whether `/metrics` needs a key when there are keys.", ""
        ),
        Option(
            "tool-call-parser",
            one_of(ToolParserName),
            ToolParserName.AUTO,
            "How the model writes calls of tools; auto is as its chat template does.",
            choices(ToolParserName),
        ),
        Option(
            "reasoning-parser",
            one_of(ReasoningParserName),
            ReasoningParserName.AUTO,
            "How the model marks its reasoning; auto is as its chat template does.",
            choices(ReasoningParserName),
        ),
        Option(
            "embedding-pooling",
            one_of(PromptPooling),
            PromptPooling.MEAN,
            "What an embedding is made of: the mean of all tokens' last hidden states, or the last token's.",
            choices(PromptPooling),
        ),
        Option("enable-slots", switch, False, "Whether `GET /slots` tells of each slot what it does.", ""),
        Option(
            "max-body-size",
            integer(1),
            _LIMITS.max_body_bytes,
            "Longest body of a request; a longer one gets a 413.",
            "BYTES",
        ),
        Option(
            "max-stored-responses",
            integer(0),
            _STORAGE.max_responses,
            "Responses of `/v1/responses` that are kept; 0 for none.",
            "N",
        ),
        Option(
            "max-stored-response-bytes",
            integer(1),
            _STORAGE.max_bytes,
            "Bytes that they may have together, in JSON.",
            "BYTES",
        ),
        Option("stored-response-ttl", seconds, _STORAGE.ttl, "Time for which a response is kept.", "SECONDS"),
        Option("keepalive-interval", seconds, 10.0, "Time between comments on a silent stream.", "SECONDS"),
        Option(
            "drain-timeout",
            seconds,
            30.0,
            "Time that running requests get when the server is told to end.",
            "SECONDS",
        ),
        Option(
            "stall-timeout",
            seconds,
            60.0,
            "Time without a finished step after which the engine counts as stalled.",
            "SECONDS",
        ),
        Option("log-level", one_of(LogLevel), LogLevel.INFO, "What is logged.", choices(LogLevel)),
        Option("log-format", one_of(LogFormat), LogFormat.TEXT, "How it is written.", choices(LogFormat)),
        Option(
            "otlp-endpoint",
            text,
            None,
            "Where traces are sent by OTLP over HTTP, as http://localhost:4318; needs the extra `otel`.",
            "URL",
            "OTEL_EXPORTER_OTLP_ENDPOINT if it is set, otherwise none",
        ),
        Option(
            "log-prompts", switch, False, "Whether prompts are logged too, as the model is given them.", ""
        ),
    ),
)

BATCHES = OptionGroup(
    "Files and batches",
    (
        Option(
            "batch-dir",
            text,
            None,
            "Folder for `/v1/files` and `/v1/batches`, of one server only.",
            "DIR",
            "none: neither is served",
        ),
        Option(
            "batch-concurrency",
            integer(1),
            None,
            "Lines of batches under way, and slots they may hold.",
            "N",
            "half of the slots",
        ),
        Option(
            "max-file-size",
            integer(1),
            _BATCHES.max_file_bytes,
            "Longest file; a longer one gets a 413.",
            "BYTES",
        ),
        Option("max-files", integer(1), _BATCHES.max_files, "Files there may be, of all keys together.", "N"),
        Option(
            "max-file-storage",
            integer(1),
            _BATCHES.max_disk_bytes,
            "Bytes of all files together; lines wait while it is full.",
            "BYTES",
        ),
    ),
)

GROUPS = (MODEL, ONE_POOL, CACHE, CODE, SCHEDULING, SERVER, BATCHES, CONNECTIONS, SIMULATION)


def read_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Return the configuration that flags and environment make. Raises `OptionError`, which names the flag at fault."""
    values = resolve_options(GROUPS, arguments, environment)
    try:
        return _compose(values, environment)
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(with_flags(str(error))) from error


def with_flags(message: str) -> str:
    """Return a message of the floors below with their fields' names as flags."""
    names = "|".join(
        sorted(
            (option.key for group in GROUPS for option in group.options if "_" in option.key),
            key=len,
            reverse=True,
        )
    )
    return re.sub(rf"\b({names})\b", lambda match: "--" + match[0].replace("_", "-"), message)


def _compose(values: Mapping[str, Any], environment: Mapping[str, str]) -> Config:
    is_simulated = values["backend"] is BackendName.SN40L
    server = _server(values)
    return Config(
        backend_name=BackendName(values["inner"]) if is_simulated else values["backend"],
        simulation=simulation_of(values) if is_simulated else None,
        backend=_backend(values),
        scheduler=scheduler_config_of(values, len(server.api_keys)),
        server=server,
        process=ProcessConfig(
            host=values["host"],
            port=values["port"],
            log_level=values["log_level"],
            log_format=values["log_format"],
            is_traced=values["otlp_endpoint"] is not None or not TRACE_VARIABLES.isdisjoint(environment),
            otlp_endpoint=values["otlp_endpoint"],
            drain_timeout=values["drain_timeout"],
            stall_timeout=values["stall_timeout"],
        ),
    )


def _backend(values: Mapping[str, Any]) -> TorchBackendConfig:
    own = {field.name for field in fields(TorchBackendConfig)} - {"pools"}
    return TorchBackendConfig(pools=pools_of(values), **{name: values[name] for name in own})


def _server(values: Mapping[str, Any]) -> ServerSettings:
    own_name = DEMO_MODEL_NAME if values["model"] == str(DEMO_MODEL) else values["model"]
    names = values["served_model_name"] or (own_name,)
    rate_limit = RateLimit(values["rate_limit_requests"], values["rate_limit_tokens"])
    file_keys = {} if values["api_key_file"] is None else read_key_file(values["api_key_file"], rate_limit)
    return ServerSettings(
        model_names=(own_name, *names) if names[0] == "*" else names,
        created=int(time.time()),
        api_keys=(*values["api_key"], *file_keys),
        rate_limit=rate_limit,
        key_rate_limits={key_name(key): limit for key, limit in file_keys.items()},
        allowed_origins=tuple(values["allowed_origins"]),
        metrics_are_open=not values["metrics_require_key"],
        priority_is_honoured=values["scheduling_order"] is QueueOrder.PRIORITY,
        slots_are_shown=values["enable_slots"],
        keepalive_interval=values["keepalive_interval"],
        queue_timeout=values["queue_timeout"],
        request_timeout=values["request_timeout"],
        tool_call_parser=values["tool_call_parser"],
        reasoning_parser=values["reasoning_parser"],
        embedding_pooling=values["embedding_pooling"],
        log_prompts=values["log_prompts"],
        limits=Limits(max_body_bytes=values["max_body_size"]),
        connections=connection_limits_of(values),
        storage=StorageLimits(
            values["max_stored_responses"], values["max_stored_response_bytes"], values["stored_response_ttl"]
        ),
        batches=_batches(values),
    )


def _batches(values: Mapping[str, Any]) -> BatchSettings | None:
    if values["batch_dir"] is None:
        return None
    return BatchSettings(
        folder=Path(values["batch_dir"]),
        max_file_bytes=values["max_file_size"],
        max_files=values["max_files"],
        max_disk_bytes=values["max_file_storage"],
        max_line_bytes=values["max_body_size"],
    )


if __name__ == "__main__":
    print(options_table(GROUPS), end="")
