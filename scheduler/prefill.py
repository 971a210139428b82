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
        return self.requests[0].num_prompt_tokens - self.num_computed_tokens

    def row(self, max_tokens: int) -> PrefillRow:
        """Return the prompt's next chunk, of at most `max_tokens` tokens."""
        add = self.requests[0].add
        start = self.num_computed_tokens
        chunk = add.prompt_token_ids[start : start + max_tokens]
        is_last = start + len(chunk) == len(add.prompt_token_ids)
        return PrefillRow(
            request_id=add.request_id,
            token_ids=chunk,
            start=start,
            num_prompt_tokens=len(add.prompt_token_ids),
            slots=tuple(request.slot for request in self.requests if request.slot is not None),
            scratch=self.scratch,
            draws=tuple(request.draw() for request in self.requests if request.needs_slot) if is_last else (),
            score=self._score(start, len(chunk)),
        )

    def advance(self, num_tokens: int, prompt_logprobs: tuple[SampledToken, ...]) -> None:
        """Account for a chunk that was read."""
        self.prompt_logprobs.extend(prompt_logprobs)
        for request in self.requests:
            request.num_computed_tokens += num_tokens

    def _score(self, start: int, num_tokens: int) -> PromptScore | None:
        """Prompt log-probabilities are reported once a request, so only the prefill of choice 0 asks for them."""
        add = self.requests[0].add
        if add.num_prompt_logprobs is None or all(request.choice != 0 for request in self.requests):
            return None
        return PromptScore(add.prompt_token_ids[start + 1 : start + num_tokens + 1], add.num_prompt_logprobs)
