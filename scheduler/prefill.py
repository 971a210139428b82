"""A prompt that prefill reads into the slots of the choices that were admitted together."""

from dataclasses import dataclass, field

from backends.interface import PrefillRow, PromptPooling, PromptScore, SampledToken
from cache.scratch import ScratchLayout
from scheduler.request import Request


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt that is read once for `requests`, all of them choices of one `Add`.

    `scratch` is the scratch, of layout `layout`, that it is read in; None: it is written straight into the
    slots. Of its question, the pool's policy reads `num_echoed` tokens again. `model` is the index of its
    pool's model.
    """

    requests: list[Request]
    scratch: int | None
    layout: ScratchLayout
    num_echoed: int = 0
    model: int = 0
    prompt_logprobs: list[SampledToken] = field(default_factory=list)
    hidden: tuple[float, ...] = ()  # pooled so far: the sum over the tokens read, or the last token's
    block_keys: tuple[bytes, ...] = ()  # of the prompt's blocks that may be stored
    restored_blocks: tuple[int, ...] = ()  # their numbers; final once `has_begun`
    num_sought_blocks: int = 0  # of its first blocks, those that an archive was searched for
    has_begun: bool = False  # its first chunk was scheduled
    is_retried: bool = False  # a step of it failed, and it is read once more

    @property
    def pool(self) -> int:
        return self.requests[0].add.pool

    @property
    def tenant(self) -> str:
        return self.requests[0].add.tenant

    @property
    def num_computed_tokens(self) -> int:
        return self.requests[0].num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        return self.requests[0].num_prefill_tokens - self.num_computed_tokens

    @property
    def batch_key(self) -> tuple[int, bool, bool, bool]:
        """The properties that all rows of one batch share: pool, with a scratch, pooled, for importance."""
        add = self.requests[0].add
        return self.pool, self.scratch is not None, add.pooling is not None, add.importance is not None

    @property
    def embedding(self) -> tuple[float, ...]:
        """The prompt as one vector, once it is read. Empty for a prompt that is not pooled."""
        num_tokens = self.num_computed_tokens if self.requests[0].add.pooling is PromptPooling.MEAN else 1
        return tuple(value / num_tokens for value in self.hidden)

    def chunk_end(self, max_tokens: int) -> int:
        """Return the end (exclusive) of the prompt's next chunk of at most `max_tokens` tokens."""
        return min(self.num_computed_tokens + max_tokens, self.round_end)

    @property
    def round_end(self) -> int:
        """The end of its tokens that are read before the next eviction, or before its slots are packed."""
        length = self.requests[0].num_prefill_tokens
        return length if self.scratch is None else self.layout.round_end(self.num_computed_tokens, length)

    def restore(self, blocks: tuple[int, ...], block_tokens: int) -> None:
        """Begin the prompt behind these stored blocks. Only before its first chunk."""
        assert not self.has_begun, "a prompt continues where it was read to"
        self.restored_blocks = blocks
        for request in self.requests:
            request.num_computed_tokens = len(blocks) * block_tokens

    def begin(self) -> None:
        """Note that its first chunk is scheduled, and that what precedes this chunk is restored."""
        self.has_begun = True
        for request in self.requests:
            request.num_cached_tokens = request.num_computed_tokens

    def restart(self) -> None:
        """Read the prompt once more, from its start: a chunk that failed may have left a part of itself."""
        self.is_retried = True
        self.has_begun = False
        self.restored_blocks = ()
        self.prompt_logprobs = []
        self.hidden = ()
        for request in self.requests:
            request.num_computed_tokens = 0
            request.num_cached_tokens = 0

    def row(self, max_tokens: int) -> PrefillRow:
        """Return the prompt's next chunk, of at most `max_tokens` tokens."""
        add = self.requests[0].add
        start = self.num_computed_tokens
        end = self.chunk_end(max_tokens)
        length = self.requests[0].num_prefill_tokens
        is_last = end == length
        has_draws = is_last and add.needs_slot
        # A chunk that fills its scratch before the prompt's end is followed by an eviction, which the last
        # tokens decide on.
        evicts = end == self.round_end and not is_last
        is_packed = has_draws and self.scratch is not None
        is_scored = is_last and add.importance is not None
        return PrefillRow(
            request_id=add.request_id,
            token_ids=add.prompt_token_ids[start:end],
            start=start,
            num_prompt_tokens=length,
            slots=tuple(request.slot for request in self.requests if request.slot is not None),
            scratch=self.scratch,
            draws=tuple(request.draw() for request in self.requests) if has_draws else (),
            score=self._score(start, end),
            ahead=add.prompt_token_ids[length - self.layout.num_ahead : length] if evicts else (),
            echo=self._echo() if evicts or is_packed or is_scored else (),
            echo_weight=add.question_weight,
            pooling=add.pooling,
            importance=add.importance,
            returns_kept=has_draws and add.returns_kept and self._has_first_choice,
            restored_token_ids=() if self.has_begun else add.prompt_token_ids[:start],
            restored_blocks=() if self.has_begun else self.restored_blocks,
        )

    def _echo(self) -> tuple[int, ...]:
        """Return the tokens of the question that vote on what is kept of the prompt."""
        add = self.requests[0].add
        question = add.question_token_ids
        if not question and add.importance is None:
            question = add.prompt_token_ids[: self.requests[0].num_prefill_tokens]
        return question[: self.num_echoed]

    def advance(
        self, num_tokens: int, prompt_logprobs: tuple[SampledToken, ...], hidden: tuple[float, ...]
    ) -> None:
        """Account for a chunk of `num_tokens` tokens that was read."""
        self.prompt_logprobs.extend(prompt_logprobs)
        is_sum = self.requests[0].add.pooling is PromptPooling.MEAN and self.hidden
        self.hidden = tuple(map(sum, zip(self.hidden, hidden, strict=True))) if is_sum else hidden
        for request in self.requests:
            request.num_computed_tokens += num_tokens

    @property
    def _has_first_choice(self) -> bool:
        return any(request.choice == 0 for request in self.requests)

    def _score(self, start: int, end: int) -> PromptScore | None:
        """Return the row's request for prompt log-probabilities.

        A request reports them once, with choice 0.
        """
        add = self.requests[0].add
        if add.num_prompt_logprobs is None or not self._has_first_choice:
            return None
        # Token i predicts token i + 1. The last token of the prefill predicts a token that is drawn, not
        # scored.
        targets_end = min(end + 1, self.requests[0].num_prefill_tokens)
        return PromptScore(add.prompt_token_ids[start + 1 : targets_end], add.num_prompt_logprobs)
