"""One request as the event loop keeps account of it: what came from the engine, and what of it was told to whoever listens."""

import asyncio
from collections import Counter
from dataclasses import replace

from scheduler.messages import Add, EngineOutput, Final, FinishReason


class Stream:
    """The outputs of one request, and where its choices stand."""

    def __init__(self, add: Add) -> None:
        self.add = add
        self.outputs: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self.open_choices = set(range(add.num_choices))  # no final output has come
        self.num_untold = add.num_choices  # choices whose final output was not told yet
        self.is_abandoned = False  # nobody listens
        self.has_read_prompt = False
        self.last_token_times: dict[int, float] = {}  # by choice
        self.answer_lengths: dict[int, int] = {}  # by choice: tokens up to a stop string
        self.num_taken: Counter[int] = Counter()  # by choice: tokens counted as output

    def take(self, choice: int, num_tokens: int) -> int:
        """Count these further tokens of a choice up to a stop string, and return how many that were."""
        total = self.num_taken[choice] + num_tokens
        total = max(self.num_taken[choice], min(total, self.answer_lengths.get(choice, total)))
        num_new = total - self.num_taken[choice]
        self.num_taken[choice] = total
        return num_new

    def settle(self, choice: int, final: Final) -> Final:
        """Return the final output to tell: a choice that a stop string ended has ended so, whatever the engine made or met after it."""
        self.num_untold -= 1
        length = self.answer_lengths.get(choice)
        if length is None:
            return final
        num_beyond = max(final.num_output_tokens - length, 0)
        return replace(
            final,
            reason=FinishReason.STOP,
            num_output_tokens=length,
            num_discarded_tokens=final.num_discarded_tokens + num_beyond,
            stop_token_id=None,
            message=None,
        )
