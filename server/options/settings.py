"""The settings of the API: groups of options, and what follows from several of them.

This module declares. It reads neither the environment nor a command line.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from backends.interface import PromptPooling
from backends.options import (
    Bytes,
    Count,
    CountOrZero,
    Folder,
    OptionGroup,
    PositiveSeconds,
    Seconds,
    Shown,
    Text,
)
from scheduler.config import SchedulerConfig
from scheduler.waiting import QueueOrder
from server.options.types import Origin, StateUrl

_SCHEDULER = SchedulerConfig()


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


class UnknownParameters(enum.StrEnum):
    """What happens to a request's parameters that the server does not know."""

    IGNORE = "ignore"
    REFUSE = "refuse"


class SchedulingOptions(OptionGroup):
    """The order of requests and their time limits."""

    title: ClassVar[str] = "Scheduling"

    scheduling_order: QueueOrder = _SCHEDULER.order
    """Which request is admitted first: fair is by the tokens that each API key was given, and first come,
    first served within each."""
    max_num_waiting: CountOrZero = _SCHEDULER.max_num_waiting
    """Sequences that may wait for a slot; more get a 429."""
    max_num_waiting_per_key: Annotated[
        CountOrZero | None,
        Shown(default="half of --max-num-waiting when there are several keys, otherwise all"),
    ] = None
    """Sequences of one API key that may wait beyond as many as there are slots; more get a 429."""
    queue_timeout: Seconds | None = None
    """Longest wait for a slot."""
    request_timeout: Seconds | None = None
    """Longest time for a whole request."""
    max_inter_token_latency: Seconds = _SCHEDULER.max_inter_token_latency
    """Target for the time between two tokens while prompts are being read. A longer one reads them sooner,
    and gives more tokens a second in all."""
    max_decode_steps: Count = _SCHEDULER.max_decode_steps
    """Most decode steps of one launch, if no request waits."""
    num_speculative_tokens: CountOrZero = _SCHEDULER.num_speculative_tokens
    """Most tokens that are guessed and then verified by one decode step, where one or two sequences are live;
    0 for none. They come from a request's text and its `prediction`, and change no answer."""


class ApiOptions(OptionGroup):
    """The API's features and its access."""

    title: ClassVar[str] = "API"

    api_key: Annotated[tuple[Text, ...], Shown("KEY", is_secret=True)] = ()
    """Keys of which requests must give one; prefer the file or the variable."""
    api_key_file: Annotated[Text | None, Shown("FILE")] = None
    """File with one key a line, which `requests=N` and `tokens=N` may follow: its own limits a minute. Lines
    with # are comments."""
    allowed_origins: tuple[Origin, ...] = ()
    """Sites whose pages may call the server from a browser (CORS): https://example.com, or * for all."""
    allowed_hosts: Annotated[
        tuple[Text, ...], Shown("NAME", default="all, with keys or an address other machines reach")
    ] = ()
    """Names by which the server may be called, beside this machine's own; * is all. Without keys on a
    loopback address, others get a 403: a page could point its own name there."""
    rate_limit_requests: Count | None = None
    """Requests that one key may send a minute; more get a 429."""
    rate_limit_tokens: Count | None = None
    """Tokens of prompts and answers that one key may use a minute."""
    state_url: Annotated[StateUrl | None, Shown("URL", default="none: in this process")] = None
    """Redis where replicas share rate limits and stored responses, as redis://host:6379/0; needs the extra
    `redis`. Prefer the variable if it has a password. Or a file where one server's stored responses outlive
    it, as sqlite:///path/responses.db."""
    metrics_require_key: bool = True
    """Whether `/metrics` needs a key when there are keys."""
    tool_call_parser: ToolParserName = ToolParserName.AUTO
    """How the model writes tool calls; auto is as its chat template does."""
    reasoning_parser: ReasoningParserName = ReasoningParserName.AUTO
    """How the model marks its reasoning; auto is as its chat template does."""
    embedding_pooling: PromptPooling = PromptPooling.MEAN
    """What an embedding is made of: the mean of all tokens' last hidden states, or the last token's."""
    enable_slots: bool = False
    """Whether `GET /slots` reports the state of each slot."""
    page: bool = True
    """Whether `/` is a page with a chat and a live view of the slots, and `/docs` the API's reference."""
    max_body_size: Bytes = 4 * 1024 * 1024
    """Longest body of a request; a longer one gets a 413."""
    keepalive_interval: Seconds = 10.0
    """Time between comments on a silent stream."""
    unknown_parameters: UnknownParameters = UnknownParameters.IGNORE
    """What happens to a request's parameters that the server does not know: ignore names them in a header of
    the answer, refuse answers 400."""
    log_prompts: bool = False
    """Whether prompts are logged too, as the model reads them."""


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


class BatchOptions(OptionGroup):
    """Files and batches."""

    title: ClassVar[str] = "Files and batches"

    batch_dir: Annotated[Folder | None, Shown("DIR", default="none: neither is served")] = None
    """Folder for `/v1/files` and `/v1/batches`, of one server only."""
    batch_concurrency: Annotated[Count | None, Shown(default="half of the slots")] = None
    """Lines of batches that run at once, and slots they may hold."""
    max_file_size: Bytes = 200 * 1024 * 1024
    """Longest file; a longer one gets a 413."""
    max_files: Count = 1000
    """Number of files, of all keys together."""
    max_file_storage: Bytes = 10 * 1024 * 1024 * 1024
    """Bytes of all files together; lines wait while it is full."""


class StorageLimits(OptionGroup):
    """How many responses are stored, and for how long."""

    title: ClassVar[str] = "Stored responses"

    max_responses: Annotated[CountOrZero, Shown(flag="max-stored-responses")] = 1000
    """Responses of `/v1/responses` that are stored; 0 for none."""
    max_bytes: Annotated[Bytes, Shown(flag="max-stored-response-bytes")] = 64 * 1024 * 1024
    """Bytes of all stored responses together, in JSON."""
    ttl: Annotated[Seconds, Shown(flag="stored-response-ttl")] = 24 * 3600.0
    """Time for which a response is stored."""


class PrefixSharing(enum.StrEnum):
    KEY = "key"  # prompts of one API key
    ALL = "all"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the API.

    `model_names[0]` is the name in responses. The others are aliases, and the alias `*` accepts any name.
    Without `api_keys`, every client is accepted. A request's own timeouts are limited by `scheduling`'s, in
    seconds; None is no limit.
    """

    model_names: tuple[str, ...]
    created: int  # when the model was loaded, in Unix seconds
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    # For a key without limits in the key file, and for all clients together if there are no keys.
    rate_limit: RateLimit = RateLimit()
    key_rate_limits: Mapping[str, RateLimit] = field(default_factory=dict, repr=False)  # by key
    host: str = "127.0.0.1"  # where the server listens
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    prefix_sharing: PrefixSharing = PrefixSharing.KEY
    limits: Limits = Limits()
    batches: BatchOptions = field(default_factory=BatchOptions)
    storage: StorageLimits = field(default_factory=StorageLimits)
    api: ApiOptions = field(default_factory=ApiOptions, repr=False)  # it has secrets
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
