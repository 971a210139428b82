"""One prompt on its way into the slots of the choices that were admitted together."""

from dataclasses import dataclass, field

from backends.interface import PrefillRow, PromptPooling, PromptScore, SampledToken
from cache.scratch import ScratchLayout
from scheduler.request import Request


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt being read once for `requests`, all of them choices of one `Add`, in a scratch of `layout` if it has one."""

    requests: list[Request]
    scratch: int | None
    layout: ScratchLayout
    prompt_logprobs: list[SampledToken] = field(default_factory=list)
    hidden: tuple[float, ...] = ()  # pooled so far: the sum over the tokens read, or the last one's

    @property
    def pool(self) -> int:
        return self.requests[0].add.pool

    @property
    def num_computed_tokens(self) -> int:
        return self.requests[0].num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        return self.requests[0].num_prefill_tokens - self.num_computed_tokens

    @property
    def batch_key(self) -> tuple[int, bool, bool]:
        """What the rows of one batch have in common."""
        return self.pool, self.scratch is not None, self.requests[0].add.pooling is not None

    @property
    def embedding(self) -> tuple[float, ...]:
        """The prompt as one vector, once it is read and if that was asked for."""
        num_tokens = self.num_computed_tokens if self.requests[0].add.pooling is PromptPooling.MEAN else 1
        return tuple(number / num_tokens for number in self.hidden)

    def chunk_end(self, max_tokens: int) -> int:
        """Return the index before which the prompt's next chunk, of at most `max_tokens` tokens, ends."""
        return min(self.num_computed_tokens + max_tokens, self._round_end)

    @property
    def _round_end(self) -> int:
        length = self.requests[0].num_prefill_tokens
        return length if self.scratch is None else self.layout.round_end(self.num_computed_tokens, length)

    def row(self, max_tokens: int) -> PrefillRow:
        """Return the prompt's next chunk, of at most `max_tokens` tokens."""
        add, start = self.requests[0].add, self.num_computed_tokens
        length, end = self.requests[0].num_prefill_tokens, self.chunk_end(max_tokens)
        is_last = end == length
        return PrefillRow(
            request_id=add.request_id,
            token_ids=add.prompt_token_ids[start:end],
            start=start,
            num_prompt_tokens=length,
            slots=tuple(request.slot for request in self.requests if request.slot is not None),
            scratch=self.scratch,
            draws=tuple(request.draw() for request in self.requests) if is_last and add.needs_slot else (),
            score=self._score(start, end),
            ahead=add.prompt_token_ids[length - self.layout.num_ahead : length]
            if end == self._round_end and not is_last
            else (),
            pooling=add.pooling,
        )

    def advance(
        self, num_tokens: int, prompt_logprobs: tuple[SampledToken, ...], hidden: tuple[float, ...]
    ) -> None:
        """Account for a chunk that was read."""
        self.prompt_logprobs.extend(prompt_logprobs)
        is_sum = self.requests[0].add.pooling is PromptPooling.MEAN and self.hidden
        self.hidden = tuple(map(sum, zip(self.hidden, hidden, strict=True))) if is_sum else hidden
        for request in self.requests:
            request.num_computed_tokens += num_tokens

    def _score(self, start: int, end: int) -> PromptScore | None:
        """Prompt log-probabilities are reported once a request, so only the prefill of choice 0 asks for them."""
        add = self.requests[0].add
        if add.num_prompt_logprobs is None or all(request.choice != 0 for request in self.requests):
            return None
        last = min(
            end + 1, self.requests[0].num_prefill_tokens
        )  # the token after it comes with the first draw
        return PromptScore(add.prompt_token_ids[start + 1 : last], add.num_prompt_logprobs)
