"""One request as the event loop sees it: the receiver of its outputs, and the progress of its choices."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from scheduler.messages import Add, EngineOutput, Final, FinishReason

Receiver: TypeAlias = Callable[[EngineOutput], None]


class Stream:
    """One submitted request.

    `receive` is None once it was abandoned: its choices still end, without a reader.
    """

    def __init__(self, add: Add, receive: Receiver) -> None:
        self.add = add
        self.receive: Receiver | None = receive
        self.open_choices = set(range(add.num_choices))  # those without a final output
        self.has_read_prompt = False
        self.last_token_times: dict[int, float] = {}  # by choice
        self.answer_lengths: dict[int, int] = {}  # by choice: tokens up to a stop string
        self.num_counted: Counter[int] = Counter()  # by choice: tokens counted as output

    def count(self, choice: int, num_tokens: int) -> int:
        """Count `num_tokens` more tokens of a choice, and return how many of them precede its stop string."""
        total = self.num_counted[choice] + num_tokens
        end = min(total, self.answer_lengths.get(choice, total))
        num_new = max(end - self.num_counted[choice], 0)
        self.num_counted[choice] += num_new
        return num_new

    def corrected(self, choice: int, final: Final) -> Final:
        """Return the final output of a choice, cut at its stop string if it has one.

        The engine may have generated more tokens, or failed, before it received `Finish`.
        """
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
