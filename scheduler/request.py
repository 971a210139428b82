"""One sequence on its way from the waiting queue to its end: counters and what follows from them.

A request with several choices is several of these, which share their `Add`. Nothing here knows of queues, batches or the clock.
"""

import enum
from dataclasses import dataclass, field

from backends.interface import DecodeRow, Draw, SampledToken
from cache.policy import CachePolicy
from scheduler.constraints import Allowed, ConstraintError, Matcher
from scheduler.messages import Add, CacheUse, Final, FinishReason, Timing
from scheduler.stats import SlotUse


class RequestStatus(enum.IntEnum):
    """In the order of a sequence's life."""

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
    arrival_order: int
    status: RequestStatus = RequestStatus.WAITING
    slot: int | None = None
    num_computed_tokens: int = (
        0  # tokens written into the cache, and so the index of the one to be written next
    )
    num_forced_left: int = field(init=False)  # tokens of the prompt that are still to be yielded by decode
    prompt_logprobs: list[SampledToken] = field(default_factory=list)  # until they are complete and told
    embedding: tuple[float, ...] = ()  # of a prompt that was pooled, at its end
    num_output_tokens: int = 0
    num_discarded_tokens: int = 0
    last_token_id: int = -1
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    admitted_time: float | None = None
    first_token_time: float | None = None
    matcher: Matcher | None = None  # of the request's grammar
    banned_token_ids: tuple[int, ...] = field(init=False)
    allowed: Allowed | None = field(init=False, default=None)  # what the grammar lets follow

    def __post_init__(self) -> None:
        self.num_forced_left = self.add.num_forced_tokens
        self.banned_token_ids = tuple(sorted(self.add.stop.stop_token_ids))
        if self.matcher is not None:
            self.allowed = self.matcher.allowed()
            if self.allowed.must_end:
                raise ConstraintError("the grammar allows no text")

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.add.prompt_token_ids)

    @property
    def num_prefill_tokens(self) -> int:
        """How much of the prompt prefill reads: the prompt's length as the layout knows it."""
        return self.num_prompt_tokens - self.add.num_forced_tokens

    @property
    def num_read_prompt_tokens(self) -> int:
        """How much of the prompt is done with."""
        if self.status <= RequestStatus.PREFILL:
            return self.num_computed_tokens
        return self.num_prompt_tokens - self.num_forced_left

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be a stop token."""
        return self.num_output_tokens >= self.add.stop.min_tokens

    @property
    def max_decode_steps(self) -> int:
        """Steps until the sequence's length ends it or what it may draw changes."""
        if self.matcher is not None:
            return max(self.num_forced_left, 1)
        stop = self.add.stop
        end = stop.max_tokens if self.may_stop else min(stop.max_tokens, stop.min_tokens)
        return self.num_forced_left + end - self.num_output_tokens

    def draw(self, num_steps: int = 1) -> Draw:
        """Return the choice of the next tokens."""
        banned = () if self.may_stop else self.banned_token_ids
        if self.num_forced_left > 0:
            return self._forced_draw(num_steps, banned)
        if self.allowed is None:
            return Draw(self.add.sampling, self.choice, self.num_output_tokens, banned)
        mask = self.allowed.token_mask(self.add.stop.stop_token_ids if self.may_stop else (), banned)
        return Draw(self.add.sampling, self.choice, self.num_output_tokens, allowed_mask=mask)

    def _forced_draw(self, num_steps: int, banned: tuple[int, ...]) -> Draw:
        """Yield the prompt's next tokens, and choose those after them, which no grammar binds: a launch ends where that begins."""
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

    def decode_row(self, num_steps: int) -> DecodeRow:
        """Return the next `num_steps` decode steps of this sequence."""
        assert self.slot is not None
        index, num_prompt_tokens = self.num_computed_tokens, self.num_prefill_tokens
        return DecodeRow(
            self.add.request_id, self.slot, self.last_token_id, index, num_prompt_tokens, self.draw(num_steps)
        )

    def append(self, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Take over sampled tokens up to the sequence's end, set `finish_reason` if it is there, and return the answer's new tokens.

        What was forced belongs to the prompt. The stop token counts as output, as it does with vLLM, but is not among the tokens returned.
        Raises `ConstraintError`.
        """
        self.last_token_id = sampled[-1].token_id
        drawn = self._take_forced(sampled)
        if self.num_forced_left > 0:
            return ()
        stop = self.add.stop
        taken = drawn[: stop.max_tokens - self.num_output_tokens]
        end = (
            next((i for i, token in enumerate(taken) if token.token_id in stop.stop_token_ids), None)
            if stop.stop_token_ids
            else None
        )
        if end is not None:
            self.finish_reason, self.stop_token_id = FinishReason.STOP, taken[end].token_id
            taken = taken[: end + 1]
        elif self._completes_grammar(taken):
            self.finish_reason = FinishReason.STOP  # whatever `min_tokens` says
        elif self.num_output_tokens + len(taken) == stop.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        self.num_output_tokens += len(taken)
        self.num_discarded_tokens += len(drawn) - len(taken)
        return taken[:end]

    def _take_forced(self, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Account for the prompt's tokens at the head of these, and return the others."""
        forced = sampled[: self.num_forced_left]
        if self.choice == 0 and self.add.num_prompt_logprobs is not None:
            self.prompt_logprobs += forced
        self.num_forced_left -= len(forced)
        return sampled[len(forced) :]

    def take_prompt_logprobs(self) -> tuple[SampledToken, ...]:
        """Hand out the prompt's log-probabilities, once, when they are complete."""
        if self.num_forced_left > 0:
            return ()
        complete, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return complete

    def _completes_grammar(self, tokens: tuple[SampledToken, ...]) -> bool:
        """Follow the answer's grammar, if it has one, and return whether no token may follow these."""
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
        self.num_output_tokens = num_kept

    def final(
        self, reason: FinishReason, now: float, policy: CachePolicy, message: str | None = None
    ) -> Final:
        """Return the account of this sequence, which ends now."""
        return Final(
            reason=reason,
            timing=Timing(self.add.arrival_time, self.admitted_time, self.first_token_time, now),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_packed_prompt_tokens=max(self.add.num_forced_tokens - self.num_forced_left - 1, 0),
            num_prefill_output_tokens=int(self.num_output_tokens > 0 and self.add.num_forced_tokens == 0),
            num_discarded_tokens=self.num_discarded_tokens,
            cache=self._cache_use(policy),
            stop_token_id=self.stop_token_id,
            message=message,
        )

    def slot_use(self, policy: CachePolicy) -> SlotUse:
        """Return the account of the slot that this sequence holds."""
        assert self.slot is not None
        return SlotUse(
            pool=self.add.pool,
            slot=self.slot,
            request_id=self.add.request_id,
            choice=self.choice,
            is_decoding=self.status is RequestStatus.DECODE,
            num_prompt_tokens=self.num_prompt_tokens,
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
        )
