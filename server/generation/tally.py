"""Counts of one request over all of its prompts and choices: what usage, progress and headers report."""

from dataclasses import dataclass, field

from scheduler.messages import CacheUse
from server.generation.events import ChoiceDelta, Drafted, DraftProgress, Event, Progress
from server.protocol.usage import CacheUsage, CompletionTokensDetails, SpeculativePrefillUsage, Usage, usage


@dataclass(slots=True)
class ChoiceCounts:
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_packed_prompt_tokens: int = 0
    num_packed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    cache: CacheUse | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        final = delta.final
        if final is not None:
            self.num_tokens = final.num_output_tokens
            self.cache = final.cache
            self.num_cached_tokens = final.num_cached_tokens
            self.num_draft_tokens = final.num_draft_tokens
            self.num_accepted_tokens = final.num_accepted_tokens
            self.num_packed_prompt_tokens = final.num_packed_prompt_tokens
            self.num_packed_tokens = self.num_tokens - min(final.num_prefill_output_tokens, self.num_tokens)


@dataclass(slots=True)
class Tally:
    """Each prompt has `num_choices` choices, numbered prompt by prompt. `pools` are the prompts' pools.

    `num_prompt_tokens` are those that the client sent, also where a draft shortens a prompt.
    """

    num_prompt_tokens: tuple[int, ...]
    pools: tuple[str, ...]
    num_choices: int
    returns_token_ids: bool = False
    drafted: Drafted | None = None  # how a draft shortened the only prompt
    _draft_progress: DraftProgress | None = None
    _num_read: list[int] = field(init=False)
    _choices: list[ChoiceCounts] = field(init=False)

    def __post_init__(self) -> None:
        self._num_read = [0] * len(self.num_prompt_tokens)
        self._choices = [ChoiceCounts() for _ in range(len(self.num_prompt_tokens) * self.num_choices)]

    def add(self, prompt: int, event: Event) -> None:
        """Count an event of a prompt."""
        match event:
            case DraftProgress():
                self._draft_progress = event
            case Drafted():
                self.drafted = event
                self.pools = (event.pool,)
                self._draft_progress = None
            case Progress(num_computed_prompt_tokens=num_read):
                self._num_read[prompt] = num_read
            case ChoiceDelta():
                self._num_read[prompt] = self.num_prompt_tokens[prompt]
                self._choices[self.choice_index(prompt, event)].add(event)
            case _:
                pass

    def choice_index(self, prompt: int, delta: ChoiceDelta) -> int:
        """Return the number of a delta's choice among those of all prompts."""
        return prompt * self.num_choices + delta.choice

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not read again. The prompt of several choices counts once."""
        return sum(choice.num_cached_tokens for choice in self._choices[:: self.num_choices])

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def pool(self) -> str:
        """The names of the pools that the prompts went to."""
        return ", ".join(dict.fromkeys(self.pools))

    @property
    def cache(self) -> CacheUsage:
        uses = [choice.cache for choice in self._choices if choice.cache is not None]
        num_kept = sum(use.num_live for use in uses)
        num_written = sum(use.num_tokens for use in uses)
        usage: CacheUsage = {
            "pool": self.pool,
            "policy": self.pool,
            "kept_tokens": num_kept,
            "evicted_tokens": sum(use.num_evicted for use in uses),
            "compression": round(num_written / num_kept, 3) if num_kept else 1.0,
            "packed_prompt_tokens": sum(
                choice.num_packed_prompt_tokens for choice in self._choices[:: self.num_choices]
            ),
            "packed_completion_tokens": sum(choice.num_packed_tokens for choice in self._choices),
        }
        if num_quantized := sum(use.num_quantized for use in uses):
            usage["quantized_tokens"] = num_quantized
        return usage

    def usage(self, num_reasoning_tokens: int = 0) -> Usage:
        num_accepted = sum(choice.num_accepted_tokens for choice in self._choices)
        details: CompletionTokensDetails = {
            "reasoning_tokens": num_reasoning_tokens,
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": sum(choice.num_draft_tokens for choice in self._choices)
            - num_accepted,
        }
        return usage(
            sum(self.num_prompt_tokens),
            self.num_cached_tokens,
            self.num_output_tokens,
            details,
            self.cache,
            self.drafted_usage,
        )

    @property
    def drafted_usage(self) -> SpeculativePrefillUsage | None:
        """What a draft did to the prompt; None without one."""
        if self.drafted is None:
            return None
        counts: SpeculativePrefillUsage = {
            "outcome": self.drafted.outcome,
            "read_tokens": self.drafted.num_read_tokens,
            "draft_tokens": self.drafted.num_draft_tokens,
        }
        if self.returns_token_ids:
            counts["read_token_ids"] = list(self.drafted.read_token_ids)
        return counts

    @property
    def progress(self) -> str:
        """What is being done, for a client that waits."""
        draft = self._draft_progress
        if draft is not None:
            return f"draft {draft.num_read}/{draft.num_tokens}"
        total = sum(self.num_prompt_tokens) if self.drafted is None else self.drafted.num_read_tokens
        num_read = sum(self._num_read)
        return f"prefill {num_read}/{total}" if num_read < total else "decode"
