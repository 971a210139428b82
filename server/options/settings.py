"""The settings of the HTTP edge: names, keys, limits and intervals.

This module knows neither the environment nor a command line.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from backends.interface import PromptPooling
from backends.options import Bytes, Count, CountOrZero, OptionGroup, PositiveSeconds, Seconds, Shown


class ToolParserName(enum.StrEnum):
    """Families of `server.parsers.tool_format`. `AUTO` is the one that the chat template shows."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    MISTRAL_V11 = "mistral_v11"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    KIMI_K2 = "kimi_k2"
    GRANITE = "granite"
    PHI4_MINI = "phi4_mini"
    QWEN3_CODER = "qwen3_coder"
    SEED_OSS = "seed_oss"
    GLM45 = "glm45"
    MINIMAX_M2 = "minimax_m2"
    PYTHONIC = "pythonic"
    OLMO3 = "olmo3"
    FUNCTION_GEMMA = "function_gemma"
    GEMMA4 = "gemma4"
    HARMONY = "harmony"
    JSON = "json"


class ReasoningParserName(enum.StrEnum):
    """Tags of `server.parsers.reasoning`. `AUTO` is those that the chat template shows.

    `HARMONY` is gpt-oss's format of reasoning and calls together.
    """

    AUTO = "auto"
    NONE = "none"
    THINK = "think"
    MISTRAL = "mistral"
    SEED = "seed"
    HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one request. A request above a limit is refused before any work is done.

    Every list is limited by `server.protocol.fields.MAX_ITEMS` too.
    """

    max_body_bytes: int = 4 * 1024 * 1024
    max_messages: int = 2048
    max_tools: int = 128
    max_prompts: int = 256  # of one completion request
    max_embedding_inputs: int = 2048
    max_choices: int = 128  # `n`
    max_sequences: int = 256  # prompts × choices
    max_stop_strings: int = 16
    max_stop_length: int = 256  # characters of one stop string
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024


class ConnectionLimits(OptionGroup):
    """Limits of one connection, and of their number."""

    title: ClassVar[str] = "Connections"

    max_connections: Count = 900
    """Connections at once, below `ulimit -n`; more get a 503."""
    read_timeout: PositiveSeconds = 60.0
    """Time for a request's head to arrive, and for each 64 KiB of its body; then it gets a 408."""
    write_timeout: PositiveSeconds = 60.0
    """Time after which a client that does not read is disconnected, and how far it may lag behind its
    stream."""
    idle_timeout: PositiveSeconds = 75.0
    """Time after which an unused connection is closed."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The most requests and tokens a minute. None is no limit."""

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The folder of files and batches, and their limits over all keys together."""

    folder: Path
    max_file_bytes: int = 200 * 1024 * 1024
    max_files: int = 1000
    max_disk_bytes: int = 10 * 1024 * 1024 * 1024
    max_uploads: int = 8  # at once
    max_lines: int = 50_000  # of one batch
    max_line_bytes: int = 4 * 1024 * 1024
    max_unfinished: int = 32
    max_batches: int = 1000  # above it, the oldest ended batches are deleted, without their files


class StorageLimits(OptionGroup):
    """How many responses are stored, and for how long."""

    title: ClassVar[str] = "Stored responses"

    max_responses: Annotated[CountOrZero, Shown(flag="max-stored-responses")] = 1000
    """Responses of `/v1/responses` that are stored; 0 for none."""
    max_bytes: Annotated[Bytes, Shown(flag="max-stored-response-bytes")] = 64 * 1024 * 1024
    """Bytes of all stored responses together, in JSON."""
    ttl: Annotated[Seconds, Shown(flag="stored-response-ttl")] = 24 * 3600.0
    """Time for which a response is stored."""


class UnknownParameters(enum.StrEnum):
    """What happens to a request's parameters that the server does not know."""

    IGNORE = "ignore"
    REFUSE = "refuse"


class PrefixSharing(enum.StrEnum):
    KEY = "key"  # prompts of one API key
    ALL = "all"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the API.

    `model_names[0]` is the name in responses. The others are aliases, and the alias `*` accepts any name.
    Without `api_keys`, every client is accepted. A request's own timeouts are limited by `queue_timeout` and
    `request_timeout`, in seconds; None is no limit.
    """

    model_names: tuple[str, ...]
    created: int  # when the model was loaded, in Unix seconds
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    # For a key without limits in the key file, and for all clients together if there are no keys.
    rate_limit: RateLimit = RateLimit()
    key_rate_limits: Mapping[str, RateLimit] = field(default_factory=dict)  # by key name
    allowed_origins: tuple[str, ...] = ()  # for CORS; `*` is any site
    metrics_are_open: bool = False  # `/metrics` needs no key
    # Names in Host headers that are served, beside this machine's own. None: all.
    allowed_hosts: tuple[str, ...] | None = None
    priority_is_honoured: bool = False  # the scheduler's order is by priority
    slots_are_shown: bool = False  # `GET /slots` is served
    page_is_shown: bool = True  # `/` and its live view are served
    keepalive_interval: float = 10.0
    queue_timeout: float | None = None
    request_timeout: float | None = None
    tool_call_parser: ToolParserName = ToolParserName.AUTO
    reasoning_parser: ReasoningParserName = ReasoningParserName.AUTO
    embedding_pooling: PromptPooling = PromptPooling.MEAN
    prefix_sharing: PrefixSharing = PrefixSharing.KEY
    log_prompts: bool = False
    unknown_parameters: UnknownParameters = UnknownParameters.IGNORE
    limits: Limits = Limits()
    batches: BatchSettings | None = None  # None: files and batches are not served
    storage: StorageLimits = field(default_factory=StorageLimits)
    # Of the Redis where replicas share rate limits and responses. None: they are in this process. Not shown,
    # since it may have a password.
    state_url: str | None = field(default=None, repr=False)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
