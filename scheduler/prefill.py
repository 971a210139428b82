"""One prompt on its way into the slots of the choices that were admitted together."""

from dataclasses import dataclass, field

from backends.interface import PrefillRow, PromptScore, SampledToken
from scheduler.request import Request


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt being read once for `requests`, all of them choices of one `Add`."""

    requests: list[Request]
    scratch: int | None
    prompt_logprobs: list[SampledToken] = field(default_factory=list)

    @property
    def num_computed_tokens(self) -> int:
        return self.requests[0].num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        return self.requests[0].num_prefill_tokens - self.num_computed_tokens

    def row(self, max_tokens: int) -> PrefillRow:
        """Return the prompt's next chunk, of at most `max_tokens` tokens."""
        add, start = self.requests[0].add, self.num_computed_tokens
        end = start + min(max_tokens, self.num_remaining_tokens)
        is_last = end == self.requests[0].num_prefill_tokens
        return PrefillRow(
            request_id=add.request_id,
            token_ids=add.prompt_token_ids[start:end],
            start=start,
            num_prompt_tokens=self.requests[0].num_prefill_tokens,
            slots=tuple(request.slot for request in self.requests if request.slot is not None),
            scratch=self.scratch,
            draws=tuple(request.draw() for request in self.requests) if is_last and add.needs_slot else (),
            score=self._score(start, end),
        )

    def advance(self, num_tokens: int, prompt_logprobs: tuple[SampledToken, ...]) -> None:
        """Account for a chunk that was read."""
        self.prompt_logprobs.extend(prompt_logprobs)
        for request in self.requests:
            request.num_computed_tokens += num_tokens

    def _score(self, start: int, end: int) -> PromptScore | None:
        """Prompt log-probabilities are reported once a request, so only the prefill of choice 0 asks for them."""
        add = self.requests[0].add
        if add.num_prompt_logprobs is None or all(request.choice != 0 for request in self.requests):
            return None
        last = min(end + 1, self.requests[0].num_prefill_tokens)  # the token after it comes with the first draw
        return PromptScore(add.prompt_token_ids[start + 1 : last], add.num_prompt_logprobs)
