"""The interface between the scheduler and a backend, which turns batches into tokens.

A batch describes one device step completely, and a result is a plain value. A step can therefore be run,
timed, recorded or simulated by any implementation of `Backend`. The limits of a backend are data, in
`BackendSpec`. There is no tensor, no text and no HTTP here.
"""

import enum
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cache.policy import CachePolicy
from cache.pool_options import KVCacheDtype
from cache.scratch import ScratchLayout


class PromptPooling(enum.StrEnum):
    """How the last layer's hidden states of a prompt's tokens become one vector."""

    MEAN = "mean"
    LAST = "last"  # the last token's


class BackendError(Exception):
    """A step failed, and the backend can run other steps.

    Each of its decode rows may be submitted once more as a step of one row and one token. A prompt may be
    read once more from its start. What the step was to store is lost.
    """


class SequencesLostError(BackendError):
    """A step failed, and its slots may hold what a second try would not expect. Its requests are lost."""


class BackendUnusableError(BackendError):
    """The backend cannot run another step."""


class CodeState(enum.StrEnum):
    """What decode steps run as."""

    PLAIN = "plain"  # the model's own code: nothing is to be compiled
    BUILDING = "building"  # slower than they will be: their code is being compiled or loaded
    COMPILED = "compiled"
    KERNELS = "kernels"  # there is no compiler: as traced, with the kernels that came with the package
    FAILED = "failed"  # slower than they could be, since compiling or loading failed


class Feature(enum.Enum):
    """What a request can require beyond greedy decoding.

    A backend declares the features that it supports. The others are refused by name.
    """

    SAMPLING = "sampling"  # temperature, top_p, top_k, min_p and seed
    PENALTIES = "penalties"  # presence, frequency and repetition
    LOGIT_BIAS = "logit_bias"
    BANNED_TOKENS = "banned_tokens"  # needed by min_tokens
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    TOKEN_MASK = "token_mask"  # needed by structured output
    FORCED_TOKENS = "forced_tokens"  # needed to read the rest of a prompt by decode
    KEPT_TOKENS = "kept_tokens"  # which tokens of a prompt its slot holds


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Names and meanings follow the OpenAI API and, for its extensions, vLLM.

    Order: penalties and `logit_bias`, then temperature, `top_k`, `top_p`, `min_p`. Temperature 0 is greedy.
    Log-probabilities are those of the model's distribution, before any of these.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    # The server draws a seed for a request without one, so the parameters reproduce every request.
    seed: int = 0
    # k: the log-probabilities of the chosen token and of the k most likely ones. None: no log-probabilities.
    num_logprobs: int | None = None
    # With log-probabilities: tokens whose own are returned too.
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def required_features(self) -> frozenset[Feature]:
        """Return the features that these parameters need."""
        needed = {
            Feature.SAMPLING: not self.is_greedy,
            Feature.PENALTIES: self.has_penalties,
            Feature.LOGIT_BIAS: bool(self.logit_bias),
            Feature.LOGPROBS: self.num_logprobs is not None,
        }
        return frozenset(feature for feature, is_needed in needed.items() if is_needed)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose. The random number depends on (`sampling.seed`, `choice`, `output_index`) only.

    With an `allowed_mask`, token t is allowed if bit t % 8 of byte t // 8 is set. Tokens beyond the mask's
    end are not allowed, and at least one token is. The batch of such a draw has one step, since the next mask
    follows from the token.

    The first steps of a launch can return `forced_token_ids` instead: tokens of the prompt that decode reads.
    Their log-probabilities are returned as `num_forced_logprobs` says. They have negative output indices, and
    penalties count them as prompt.
    """

    sampling: SamplingParams
    choice: int = 0
    output_index: int = 0
    banned_token_ids: tuple[int, ...] = ()  # never chosen at this draw
    allowed_mask: bytes | None = None
    forced_token_ids: tuple[int, ...] = ()
    num_forced_logprobs: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the draw depends on the logits, on temperature and filters, and on nothing else."""
        is_free = not self.banned_token_ids and self.allowed_mask is None and not self.forced_token_ids
        return is_free and self.sampling.required_features() <= {Feature.SAMPLING}

    def num_logprobs(self, step: int) -> int | None:
        """Return the number of alternatives of a step's token. None is no log-probabilities."""
        return self.num_forced_logprobs if step < len(self.forced_token_ids) else self.sampling.num_logprobs

    def logprob_token_ids(self, step: int) -> tuple[int, ...]:
        """Return the tokens whose log-probabilities a step returns too."""
        return () if step < len(self.forced_token_ids) else self.sampling.logprob_token_ids


@dataclass(frozen=True, slots=True)
class PromptScore:
    """A request for the log-probability of each `target_ids[i]`, given all tokens up to the chunk's token i.

    It has an id for each token of the chunk, or one less when the chunk ends the prompt.
    """

    target_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class Importance:
    """A request for the importance of each `chunk_tokens` tokens of a prompt, by the attention that they get.

    Without `num_ahead`, the prompt's last tokens and `PrefillRow.echo` are the queries, and a key counts as
    much as the largest attention of any. With it, the queries are the prompt's last token and the `num_ahead`
    − 1 tokens that follow greedily, up to one of `stop_token_ids`, and their mean counts. Keys are the
    prompt's tokens alone.
    """

    chunk_tokens: int = 32
    num_ahead: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that is written to the prefix store: its number there, and its index in the sequence."""

    number: int
    index: int


@dataclass(frozen=True, slots=True)
class SlotStore:
    """Blocks to store of a sequence that has ended. Its slot still holds all of its tokens."""

    pool: int
    slot: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...]  # of the sequence, up to the last block's end
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A chunk of one prompt.

    `slots` are the slots that hold the prompt at the end: one for each choice, and none if the prompt is only
    scored. Without `scratch`, the chunk is written into the slots directly, which a pool allows up to its
    `max_direct_tokens`. With it, the prompt is read into that scratch, and the last chunk packs it into the
    slots. `draws` has one entry for each slot in the last chunk, and none before.

    `ahead` are the prompt's last tokens, for a chunk that fills a scratch which is smaller than the prompt.
    Their attention selects the entries that the scratch evicts after the chunk. `echo` are tokens of the
    question, for such a chunk and for a last chunk that is packed. They are read again behind the prompt, and
    vote too, with `echo_weight` of the vote of the prompt's last token. Nothing of them is kept.

    A prompt's first chunk begins where its `restored_blocks` end: these numbers of the prefix store hold the
    tokens before it, `restored_token_ids`. `stored_blocks` end with this chunk or before, and are stored
    after it is read, and before the scratch evicts.
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
    echo: tuple[int, ...] = ()
    echo_weight: float = 1.0
    pooling: PromptPooling | None = None  # not None: return the chunk's hidden states
    importance: Importance | None = None  # not None: the last chunk returns it; there are no slots
    returns_kept: bool = False  # of a last chunk with slots: return which tokens they hold
    restored_token_ids: tuple[int, ...] = ()
    restored_blocks: tuple[int, ...] = ()
    stored_blocks: tuple[StoredBlock, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.start == len(self.restored_token_ids)

    @property
    def is_last(self) -> bool:
        return self.start + len(self.token_ids) == self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Chunks of different prompts, read in one step of shape `shape`.

    Either all rows have a scratch or none has. Either all are pooled or none is; pooled rows have no scores
    and draws. The same holds for rows that return their importance. `slot_stores` are stored before anything
    else, then all rows are restored, then read.
    """

    rows: tuple[PrefillRow, ...]
    shape: "PrefillShape"
    pool: int = 0
    slot_stores: tuple[SlotStore, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One live slot. `token_id` is written at `index` of its sequence, and the next token is drawn.

    `draft_token_ids` are a guess of the tokens that are drawn. Each one that is drawn is written too, and the
    same step draws the token after it. The first draw that differs is the row's last.
    """

    request_id: str
    slot: int
    token_id: int
    index: int
    num_prompt_tokens: int
    draw: Draw
    draft_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """`num_steps` decode steps of every row. Each step adds one to `Draw.output_index`.

    `slot_stores` are stored first. If a row has a draft, there is one step, and the draws of all rows need
    no feature but `SAMPLING` and force no token (`Draw.is_plain`). No token of a draft may overwrite another
    token in its slot, because it may turn out to be wrong.
    """

    rows: tuple[DecodeRow, ...]
    num_steps: int = 1
    pool: int = 0
    slot_stores: tuple[SlotStore, ...] = ()

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(row.draft_token_ids) for row in self.rows)


Batch: TypeAlias = PrefillBatch | DecodeBatch


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, with its log-probability and those of the alternatives, most likely first, if requested.

    `named_logprobs` are those of `SamplingParams.logprob_token_ids`, in their order.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    named_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Which of a prompt's `num_tokens` tokens its slot held once prefill had filled it.

    `heads` [layer][kv_head] are bitmaps: bit i % 8 of byte i // 8 says whether token i is held. Layers with a
    sliding window are left out unless all have one.
    """

    num_tokens: int
    heads: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a step, by row of its batch.

    `tokens[row]` has one token for each draw (prefill) or step (decode), and in a batch with drafts one more
    than were guessed; where a later step of a launch failed, those of the steps before it, as many in every
    row. `prompt_logprobs[row]` (prefill) has one for each requested target. `hidden[row]` (prefill of pooled
    rows) has `BackendSpec.embedding_size`
    numbers: the sum of the chunk's hidden states after the last layer's norm, or the last token's.
    `importance[row]` (prefill of rows that request it) has a number for each chunk of a prompt that ends with
    the row, and none before. `kept[row]` (prefill, if any row requests it) is None for the other rows.
    `elapsed` is in seconds of the backend's clock, and includes `restore_time`, that of restoring stored
    blocks.
    """

    tokens: tuple[tuple[SampledToken, ...], ...]
    elapsed: float
    prompt_logprobs: tuple[tuple[SampledToken, ...], ...] = ()
    hidden: tuple[tuple[float, ...], ...] = ()
    restore_time: float = 0.0
    importance: tuple[tuple[float, ...], ...] = ()
    kept: tuple[KeptTokens | None, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """A static shape of prefill: up to `num_rows` chunks of up to `num_tokens` tokens each."""

    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SlotPoolSpec:
    """Slots of one policy.

    Prompts of up to `max_direct_tokens` are written into their slot, longer ones into a scratch. The pools of
    a backend have different names, by which requests select them. `policy` is that of the model's full-
    attention layers. Layers with a sliding window can hold less, which both limits account for: they hold all
    tokens of sequences of up to `max_exact_tokens`. Slots hold keys and values in `kv_cache_dtype`; scratches
    always hold the model's type. A slot takes `slot_bytes` of memory; 0 where it takes none. A pool without
    slots reads prompts for their importance alone. A decode step verifies drafts of up to `max_draft_tokens`
    tokens, the sum over its rows.
    """

    num_slots: int
    policy: CachePolicy
    max_direct_tokens: int
    max_exact_tokens: int
    name: str
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    slot_bytes: int = 0
    max_draft_tokens: int = 0

    def draft_room(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return how many tokens may follow `num_tokens` until one overwrites another in any layer."""
        room = self.policy.ring_room(num_prompt_tokens, num_tokens)
        return min(room, self.max_exact_tokens - num_tokens)


@dataclass(frozen=True, slots=True)
class ScratchSpec:
    """The buffers in which prompts longer than a slot are read."""

    num_scratch: int
    layout: ScratchLayout


@dataclass(frozen=True, slots=True)
class PrefixSpec:
    """The store of blocks of prompts, of `block_tokens` tokens each, from the first one on.

    Blocks have all of their tokens, unlike slots.
    """

    num_blocks: int
    block_tokens: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """The limits and features of a backend, fixed when it is built.

    They are those of the model that answers. `drafts` are models that only score prompts for it, each with
    limits of its own. Pools are numbered through all models: those of the drafts follow `pools`.
    """

    vocab_size: int
    max_model_len: int
    pools: tuple[SlotPoolSpec, ...]
    scratch: ScratchSpec
    prefill_shapes: tuple[PrefillShape, ...]  # at least one; sorted by tokens, then by rows
    features: frozenset[Feature]
    max_decode_steps: int = 1
    simulated: bool = False
    embedding_size: int = 0  # of a pooled prompt; 0: pooling is not supported
    prefixes: PrefixSpec | None = None  # None: nothing of a prompt is stored for later ones
    description: str = ""  # type, device and memory, for people
    drafts: tuple["BackendSpec", ...] = ()

    @property
    def models(self) -> tuple["BackendSpec", ...]:
        """The limits of each model: of the one that answers, then of the drafts."""
        return (self, *self.drafts)

    def model_of(self, pool: int) -> tuple[int, int]:
        """Return the index of a pool's model in `models`, and the pool's index in that model's `pools`."""
        for index, model in enumerate(self.models):
            if pool < len(model.pools):
                return index, pool
            pool -= len(model.pools)
        raise ValueError(f"there is no pool {pool} behind the last one")


@dataclass(frozen=True, slots=True)
class ArchiveStats:
    """The use of an archive, in blocks: loaded and saved since the start, and held now."""

    num_loaded: int = 0
    num_saved: int = 0
    num_held: int = 0  # by all of its writers
    is_saving: bool = False  # False after a failure


class PrefixArchive(Protocol):
    """Stored blocks that outlive the prefix store, by key. Used between steps."""

    def load(self, key: bytes, number: int) -> bool:
        """Copy a block to this number of the prefix store; return False if it is not there."""
        ...

    def save(self, key: bytes, number: int) -> None:
        """Keep the block that has this number now. It may be dropped."""
        ...

    def reset(self) -> None:
        """Forget all blocks."""
        ...

    def stats(self) -> ArchiveStats: ...


class Pending(Protocol):
    """A step that was submitted."""

    def result(self) -> BatchResult:
        """Wait for the step's end. Raises `BackendError`."""
        ...


class Backend(Protocol):
    """Turns batches into tokens. Used by one thread."""

    @property
    def spec(self) -> BackendSpec: ...

    @property
    def prefix_archive(self) -> PrefixArchive | None: ...

    @property
    def code(self) -> CodeState:
        """What decode steps run as now. Any thread may read it."""
        ...

    def warmup(self) -> None:
        """Do the one-time work that would make the first requests slow."""
        ...

    def use_idle_time(self) -> bool:
        """Do a part of the work that waits until there is no request, within a second.

        Returns whether there was any.
        """
        ...

    def submit(self, batch: Batch) -> Pending:
        """Start a step. Steps are run in the order in which they are submitted."""
        ...

    def close(self) -> None:
        """Release all resources. No step follows."""
        ...
