"""The line between the scheduler and whatever turns a batch into tokens.

A batch is a complete description of one device step and a result is a plain value, so that a step can be run, timed, recorded or simulated
by anything that implements `Backend`. Limits of a backend are data (`BackendSpec`), never knowledge of the scheduler's. There is no tensor,
no text and no HTTP here.
"""

import enum
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cache.policy import CachePolicy
from cache.scratch import ScratchLayout


class PromptPooling(enum.StrEnum):
    """How the last layer's hidden states of a prompt's tokens become one vector."""

    MEAN = "mean"
    LAST = "last"  # the last token's


class BackendError(Exception):
    """A step failed; the requests of its batch are lost, the backend can go on."""


class BackendUnusableError(BackendError):
    """The backend cannot run another step."""


class Feature(enum.Enum):
    """What a request may ask of a backend beyond greedy decoding. A backend declares what it honours; the rest is refused by name."""

    SAMPLING = "sampling"  # temperature, top_p, top_k, min_p and seed
    PENALTIES = "penalties"  # presence, frequency and repetition
    LOGIT_BIAS = "logit_bias"
    BANNED_TOKENS = "banned_tokens"  # needed by min_tokens
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    TOKEN_MASK = "token_mask"  # needed by structured output
    FORCED_TOKENS = "forced_tokens"  # needed to take the rest of a prompt through decode


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Names and meanings follow the OpenAI API and, for its extensions, vLLM.

    Order: penalties and `logit_bias`, then temperature, `top_k`, `top_p`, `min_p`. Temperature 0 is greedy. Log-probabilities are those of
    the model's own distribution, before any of these.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # whoever has no seed of the user's draws one, so that every request is reproducible from its parameters
    num_logprobs: int | None = (
        None  # None: no log-probabilities; k: the chosen token's and the k most likely tokens'
    )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def required_features(self) -> frozenset[Feature]:
        """Return the features without which these parameters cannot be honoured."""
        needed = {
            Feature.SAMPLING: not self.is_greedy,
            Feature.PENALTIES: self.has_penalties,
            Feature.LOGIT_BIAS: bool(self.logit_bias),
            Feature.LOGPROBS: self.num_logprobs is not None,
        }
        return frozenset(feature for feature, is_needed in needed.items() if is_needed)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be chosen. The random number depends on (`sampling.seed`, `choice`, `output_index`) and on nothing else.

    With an `allowed_mask`, token t may be chosen if bit t % 8 of byte t // 8 is set, and none that lies beyond the mask's end; at least one
    may. Such a draw's batch has one step, since the next mask follows from the token.

    The first steps of a launch may yield `forced_token_ids` instead of choosing: tokens of the prompt that are read by decode. They come
    with log-probabilities if `num_forced_logprobs` says so, as `SamplingParams.num_logprobs` does for the others, stand at negative output
    indices, and count as prompt for the penalties.
    """

    sampling: SamplingParams
    choice: int = 0
    output_index: int = 0
    banned_token_ids: tuple[int, ...] = ()  # never chosen at this draw
    allowed_mask: bytes | None = None
    forced_token_ids: tuple[int, ...] = ()
    num_forced_logprobs: int | None = None

    def num_logprobs(self, number: int) -> int | None:
        """Return how many alternatives the `number`th step's token comes with; None: without log-probabilities."""
        return self.num_forced_logprobs if number < len(self.forced_token_ids) else self.sampling.num_logprobs


@dataclass(frozen=True, slots=True)
class PromptScore:
    """A request for the log-probabilities of prompt tokens: of `target_ids[i]` given everything up to the chunk's token i.

    As long as the chunk, or one shorter when the chunk ends the prompt.
    """

    target_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A chunk of one prompt.

    `slots` are the slots that hold the prompt at the end (several when one prompt has several choices; none when it is only scored).
    Without `scratch` the chunk is written straight into them, which a pool allows up to its `max_direct_tokens`; with it, the prompt is
    read in that scratch and packed into the slots by its last chunk. `draws` has one entry a slot in the last chunk and none before.
    A chunk whose end fills a scratch that the prompt outgrows has the prompt's last tokens as `ahead`: by what these look for is chosen
    what the scratch gives up after the chunk.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int  # index in the sequence of the chunk's first token
    num_prompt_tokens: int
    slots: tuple[int, ...]
    scratch: int | None = None
    draws: tuple[Draw, ...] = ()
    score: PromptScore | None = None
    ahead: tuple[int, ...] = ()
    pooling: PromptPooling | None = None  # the chunk's hidden states are asked for

    @property
    def is_last(self) -> bool:
        return self.start + len(self.token_ids) == self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Chunks of different prompts, read in one step of shape `shape`.

    Either all rows have a scratch or none has, and either all are pooled (then none is scored or drawn from) or none is.
    """

    rows: tuple[PrefillRow, ...]
    shape: "PrefillShape"
    pool: int = 0


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One live slot: `token_id` stands at `index` of its sequence and is written there; the token after it is drawn."""

    request_id: str
    slot: int
    token_id: int
    index: int
    num_prompt_tokens: int
    draw: Draw


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """`num_steps` decode steps of every row, each step feeding the next; `Draw.output_index` counts up by one a step."""

    rows: tuple[DecodeRow, ...]
    num_steps: int = 1
    pool: int = 0


Batch: TypeAlias = PrefillBatch | DecodeBatch


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, with the log-probabilities that were asked for: its own and, most likely first, the alternatives'."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a step brought, row by row as in its batch.

    `tokens[row]` has one token a draw (prefill) or one a step (decode); `prompt_logprobs[row]` (prefill) one a target asked for.
    `hidden[row]` (prefill, pooled rows) has `BackendSpec.embedding_size` numbers: the sum over the chunk's tokens of their hidden states
    after the last layer's norm, or the last token's. `elapsed` is in seconds of the backend's clock.
    """

    tokens: tuple[tuple[SampledToken, ...], ...]
    elapsed: float
    prompt_logprobs: tuple[tuple[SampledToken, ...], ...] = ()
    hidden: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """A static shape of prefill: up to `num_rows` chunks of up to `num_tokens` tokens each."""

    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SlotPoolSpec:
    """Slots of one policy. A prompt of up to `max_direct_tokens` is written straight into its slot, a longer one goes through scratch.

    No two pools of a backend have the same `name`, by which requests ask for them.

    `policy` is that of the model's full-attention layers; layers of other kinds may hold less and are accounted for in `max_direct_tokens`.
    """

    num_slots: int
    policy: CachePolicy
    max_direct_tokens: int
    name: str


@dataclass(frozen=True, slots=True)
class ScratchSpec:
    """Places where prompts longer than a slot are read."""

    num_scratch: int
    layout: ScratchLayout


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a backend can do, fixed when it is built."""

    vocab_size: int
    max_model_len: int
    pools: tuple[SlotPoolSpec, ...]
    scratch: ScratchSpec
    prefill_shapes: tuple[PrefillShape, ...]  # at least one; sorted by tokens, then by rows
    features: frozenset[Feature]
    max_decode_steps: int = 1
    simulated: bool = False
    embedding_size: int = 0  # numbers of a pooled prompt; 0: pooling is not supported


class Pending(Protocol):
    """A step under way."""

    def result(self) -> BatchResult:
        """Wait for the step's end. Raises `BackendError`, after which the batch's requests are lost."""
        ...


class Backend(Protocol):
    """Turns batches into tokens. Used by one thread."""

    @property
    def spec(self) -> BackendSpec: ...

    def warmup(self) -> None:
        """Do once whatever would make the first requests slow."""
        ...

    def submit(self, batch: Batch) -> Pending:
        """Start a step. Steps are run in the order in which they are submitted."""
        ...

    def close(self) -> None:
        """Give everything back. No step follows."""
        ...
