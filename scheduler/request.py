"""One sequence from the waiting queue to its end: its counters and the values derived from them.

A request with several choices has one `Request` a choice, which share their `Add`. Nothing here knows queues,
batches or the clock.

A forced token is a token of the prompt that decode reads, one a step, and yields instead of sampling.
"""

import enum
from dataclasses import dataclass, field

from backends.interface import DecodeRow, Draw, KeptTokens, SampledToken
from cache.policy import CachePolicy
from scheduler.constraints import Allowed, ConstraintError, Matcher
from scheduler.lookup import Lookup
from scheduler.messages import Add, CacheUse, Final, FinishReason, Timing
from scheduler.stats import SlotUse


class RequestStatus(enum.IntEnum):
    """The states of a sequence, in the order of its life."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """One choice of an `Add`. Belongs to the engine's thread."""

    add: Add
    choice: int
    needs_scratch: bool
    arrival_order: int  # the same for all choices
    status: RequestStatus = RequestStatus.WAITING
    slot: int | None = None
    num_computed_tokens: int = 0  # tokens written into the cache: the index of the next one to be written
    num_cached_tokens: int = 0  # of these, restored from stored blocks
    num_prompt_tokens: int = field(init=False)
    num_prefill_tokens: int = field(
        init=False
    )  # that prefill reads: the prompt's length for the slot's layout
    num_forced_left: int = field(init=False)  # forced tokens that decode has yet to read
    prompt_logprobs: list[SampledToken] = field(default_factory=list)  # until they are complete and emitted
    embedding: tuple[float, ...] = ()  # of a prompt that was pooled, at its end
    importance: tuple[float, ...] = ()  # of a prompt's chunks, at its end
    kept: KeptTokens | None = None  # what its slot holds of the prompt, until it was reported
    is_retried: bool = False  # its last decode step failed, and the next one is its last try
    output_token_ids: list[int] = field(default_factory=list)
    num_discarded_tokens: int = 0
    lookup: Lookup | None = None  # made for the first draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    last_token_id: int = -1
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    admitted_time: float | None = None
    first_token_time: float | None = None
    matcher: Matcher | None = None  # of the request's grammar
    banned_token_ids: tuple[int, ...] = field(init=False)  # until `min_tokens`
    allowed: Allowed | None = field(init=False, default=None)  # the tokens that the grammar allows next

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.add.prompt_token_ids)
        self.num_forced_left = self.add.num_forced_tokens
        self.num_prefill_tokens = self.num_prompt_tokens - self.num_forced_left
        self.banned_token_ids = tuple(sorted(self.add.stop.stop_token_ids))
        if self.matcher is not None:
            self.allowed = self.matcher.allowed()
            if self.allowed.must_end:
                raise ConstraintError("the grammar allows no text")

    @property
    def num_read_prompt_tokens(self) -> int:
        """How many prompt tokens have been read, by prefill or decode."""
        if self.status <= RequestStatus.PREFILL:
            return self.num_computed_tokens
        return self.num_prompt_tokens - self.num_forced_left

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def written_token_ids(self) -> tuple[int, ...]:
        """The sequence's tokens that were written into its slot, without those discarded."""
        token_ids = (*self.add.prompt_token_ids, *self.output_token_ids)
        return token_ids[: self.num_computed_tokens]

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be a stop token."""
        return self.num_output_tokens >= self.add.stop.min_tokens

    @property
    def max_decode_steps(self) -> int:
        """Steps until the sequence reaches its length or its set of allowed tokens changes.

        The mask of a grammar follows from the last token, so a launch has one step once forced tokens are
        read, or as many as any token may follow in.
        """
        if self.allowed is not None and self.allowed.num_free == 0:
            return max(self.num_forced_left, 1)
        stop = self.add.stop
        end = stop.max_tokens if self.may_stop else min(stop.max_tokens, stop.min_tokens)
        num_steps = end - self.num_output_tokens
        if self.allowed is not None:
            num_steps = min(num_steps, self.allowed.num_free)
        return self.num_forced_left + num_steps

    def draw(self, num_steps: int = 1) -> Draw:
        """Return how the next `num_steps` tokens are sampled."""
        banned = () if self.may_stop else self.banned_token_ids
        if self.num_forced_left > 0:
            return self._forced_draw(num_steps, banned)
        if self.allowed is None or self.allowed.num_free > 0:
            return Draw(self.add.sampling, self.choice, self.num_output_tokens, banned)
        mask = self.allowed.token_mask(self.add.stop.stop_token_ids if self.may_stop else (), banned)
        return Draw(self.add.sampling, self.choice, self.num_output_tokens, allowed_mask=mask)

    def _forced_draw(self, num_steps: int, banned: tuple[int, ...]) -> Draw:
        """Return a draw that yields the next forced tokens and samples those after them.

        It needs no mask: with a grammar, `max_decode_steps` ends the launch at the last forced token.
        """
        forced = self.add.prompt_token_ids[-self.num_forced_left :][:num_steps]
        num_logprobs = self.add.num_prompt_logprobs if self.choice == 0 else None
        return Draw(
            self.add.sampling,
            self.choice,
            -self.num_forced_left,
            banned,
            forced_token_ids=forced,
            num_forced_logprobs=num_logprobs,
        )

    def draft(self, max_tokens: int, room: int) -> tuple[int, ...]:
        """Return a guess of at most `max_tokens` next tokens, or () where it would hardly pay.

        Up to `room` tokens may be written.
        """
        # A token more is written than the draft has, and one more is drawn.
        num_left = self.add.stop.max_tokens - self.num_output_tokens
        max_tokens = min(max_tokens, room - 1, num_left - 1)
        if self.allowed is not None:
            max_tokens = min(max_tokens, self.allowed.num_free - 1)
        if max_tokens < 1:
            return ()
        if self.lookup is None:
            self.lookup = Lookup(self.add.prompt_token_ids, self.add.prediction_token_ids)
        return self.lookup.draft(self.output_token_ids, max_tokens)

    def observe_draft(self, num_tokens: int, sampled: tuple[SampledToken, ...]) -> None:
        """Learn which tokens were drawn in the step of a draft, before they are appended."""
        assert self.lookup is not None, "a draft comes from a lookup"
        self.lookup.observe(len(sampled) - 1)
        self.num_draft_tokens += num_tokens
        stop_index = self._stop_index(sampled)  # those behind it are no part of the answer
        self.num_accepted_tokens += len(sampled) - 1 if stop_index is None else stop_index

    def decode_row(self, num_steps: int, draft: tuple[int, ...] = ()) -> DecodeRow:
        """Return the next `num_steps` decode steps of this sequence."""
        assert self.slot is not None
        return DecodeRow(
            request_id=self.add.request_id,
            slot=self.slot,
            token_id=self.last_token_id,
            index=self.num_computed_tokens,
            num_prompt_tokens=self.num_prefill_tokens,
            draw=self.draw(num_steps),
            draft_token_ids=draft,
        )

    def append(self, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Append sampled tokens up to the sequence's end, and return the answer's new tokens.

        Sets `finish_reason` if the sequence ends. Forced tokens belong to the prompt. The stop token counts
        as output, as in vLLM, but is not returned. Raises `ConstraintError`.
        """
        self.last_token_id = sampled[-1].token_id
        drawn = self._take_forced(sampled)
        if self.num_forced_left > 0:
            return ()
        kept = drawn[: self.add.stop.max_tokens - self.num_output_tokens]
        stop_index = self._stop_index(kept)
        if stop_index is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_token_id = kept[stop_index].token_id
            kept = kept[: stop_index + 1]
        elif self._completes_grammar(kept):
            self.finish_reason = FinishReason.STOP  # also before `min_tokens`: nothing may follow
        elif self.num_output_tokens + len(kept) == self.add.stop.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        self.output_token_ids += (token.token_id for token in kept)
        self.num_discarded_tokens += len(drawn) - len(kept)
        return kept[:stop_index]

    def _stop_index(self, tokens: tuple[SampledToken, ...]) -> int | None:
        stop_token_ids = self.add.stop.stop_token_ids
        if not stop_token_ids:
            return None
        return next((i for i, token in enumerate(tokens) if token.token_id in stop_token_ids), None)

    def _take_forced(self, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Account for the forced tokens, which come first, and return the others."""
        forced = sampled[: self.num_forced_left]
        if self.choice == 0 and self.add.num_prompt_logprobs is not None:
            self.prompt_logprobs += forced
        self.num_forced_left -= len(forced)
        return sampled[len(forced) :]

    def take_prompt_logprobs(self) -> tuple[SampledToken, ...]:
        """Return the prompt's log-probabilities once, when they are complete; otherwise nothing."""
        if self.num_forced_left > 0:
            return ()
        complete = tuple(self.prompt_logprobs)
        self.prompt_logprobs = []
        return complete

    def _completes_grammar(self, tokens: tuple[SampledToken, ...]) -> bool:
        """Advance the answer's grammar, if it has one, and return whether no token may follow `tokens`."""
        if self.matcher is None:
            return False
        for token in tokens:
            self.matcher.advance(token.token_id)
        self.allowed = self.matcher.allowed()
        return self.allowed.must_end

    def cut(self, num_tokens: int) -> None:
        """End the answer after its first `num_tokens` tokens."""
        num_kept = min(num_tokens, self.num_output_tokens)
        self.num_discarded_tokens += self.num_output_tokens - num_kept
        del self.output_token_ids[num_kept:]
        self.num_accepted_tokens = min(self.num_accepted_tokens, num_kept)

    def final(
        self, reason: FinishReason, now: float, policy: CachePolicy, message: str | None = None
    ) -> Final:
        """Return the final account of this sequence, which ends at `now`."""
        return Final(
            reason=reason,
            timing=Timing(self.add.arrival_time, self.admitted_time, self.first_token_time, now),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_packed_prompt_tokens=max(self.add.num_forced_tokens - self.num_forced_left - 1, 0),
            num_prefill_output_tokens=int(self.num_output_tokens > 0 and self.add.num_forced_tokens == 0),
            num_discarded_tokens=self.num_discarded_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            cache=self._cache_use(policy),
            stop_token_id=self.stop_token_id,
            turn=self.arrival_order,
            message=message,
        )

    def slot_use(self, policy: CachePolicy) -> SlotUse:
        """Return the use of the slot that this sequence holds."""
        assert self.slot is not None
        return SlotUse(
            pool=self.add.pool,
            slot=self.slot,
            request_id=self.add.request_id,
            choice=self.choice,
            is_decoding=self.status is RequestStatus.DECODE,
            num_prompt_tokens=self.num_prompt_tokens,
            num_prefill_tokens=self.num_prefill_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_output_tokens=self.num_output_tokens,
            num_live=policy.num_live(self.num_prefill_tokens, self.num_computed_tokens),
        )

    def _cache_use(self, policy: CachePolicy) -> CacheUse | None:
        if self.slot is None or self.num_computed_tokens < self.num_prefill_tokens:
            return None
        num_live = policy.num_live(self.num_prefill_tokens, self.num_computed_tokens)
        return CacheUse(
            num_prompt_tokens=self.num_prefill_tokens,
            num_tokens=self.num_computed_tokens,
            num_live=num_live,
            num_evicted=self.num_computed_tokens - num_live,
            num_ring_wraps=policy.place(self.num_prefill_tokens).num_ring_wraps(self.num_computed_tokens),
            num_quantized=policy.num_quantized(self.num_computed_tokens),
        )
