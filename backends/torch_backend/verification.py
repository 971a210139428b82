"""Drafts in a decode step: a draft's tokens are further rows of their sequence's slot.

Each row writes its token to the entry where the sequence would have it, and sees the entries up to its own. A
token that turns out to be wrong is not undone. The next token has the same index, and so overwrites it before
any row sees it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from backends.interface import DecodeBatch, DecodeRow, SampledToken, SlotPoolSpec
from backends.torch_backend.pending import Outcome

# Rows that a step may have in all. Products of up to 8 rows take about as long as those of one.
_MAX_ROWS = 8


def most_draft_tokens(pool: SlotPoolSpec) -> int:
    """Return how many tokens of drafts a step of the pool may read.

    Where there is one slot, a step is compiled for exactly one row. With a store, it has one for each slot.
    """
    return 0 if pool.num_slots < 2 or pool.policy.store is not None else _MAX_ROWS - 1


def with_drafts(batch: DecodeBatch) -> list[DecodeRow]:
    """Return a row for each token that a batch reads: of each row its token, then its draft."""
    rows = []
    for row in batch.rows:
        for offset, token_id in enumerate((row.token_id, *row.draft_token_ids)):
            draw = replace(row.draw, output_index=row.draw.output_index + offset)
            index = row.index + offset
            rows.append(replace(row, token_id=token_id, index=index, draw=draw, draft_token_ids=()))
    return rows


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """The draws of a step that read drafts, on their way to the host's memory."""

    batch: DecodeBatch
    drawn: Tensor  # [row], in the order of `with_drafts`

    def collect(self) -> Outcome:
        """Return the tokens of each row of the batch, up to the first that its draft did not guess."""
        drawn = self.drawn.tolist()
        tokens = []
        for row in self.batch.rows:
            num_rows = 1 + len(row.draft_token_ids)
            tokens.append(_accepted(row.draft_token_ids, drawn[:num_rows]))
            drawn = drawn[num_rows:]
        return Outcome(tuple(tokens))


def _accepted(draft: Sequence[int], drawn: Sequence[int]) -> tuple[SampledToken, ...]:
    num_right = 0
    while num_right < len(draft) and draft[num_right] == drawn[num_right]:
        num_right += 1
    return tuple(SampledToken(token_id) for token_id in drawn[: num_right + 1])
