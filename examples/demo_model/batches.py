"""From made-up text to batches of token ids, with what is to be learned of them and at which positions they stand."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from examples.demo_model import corpus
from examples.demo_model.stages import Stage
from examples.demo_model.tokenizer import ASSISTANT, BOS, EOS, PAD, SPECIAL_TOKENS, SYSTEM, USER

SMALL_TALK_BATCH = 32
READ_ANSWER = "I have read the text."
IGNORED = -100

# A piece of text and whether the model learns to write it; special tokens are pieces of their own.
Piece = tuple[str, bool]


@dataclass(frozen=True)
class Batch:
    """Token ids, their positions, the next tokens to learn (else IGNORED) and whether these begin an answer: each [sequence, position]."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    is_first: torch.Tensor


class Writer:
    """Turns conversations into token ids with targets."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        backend: Any = tokenizer.backend_tokenizer
        self._special: dict[str, int] = {token: backend.token_to_id(token) for token in SPECIAL_TOKENS}

    @property
    def pad(self) -> int:
        """The id that fills short rows up."""
        return self._special[PAD]

    def batch(self, rng: random.Random, stage: Stage) -> Batch:
        """Write a batch of documents with questions."""
        conversations = [_document_turns(rng, stage) for _ in range(stage.batch_size)]
        return self._to_batch(rng, conversations, stage.max_position)

    def small_talk_batch(self, rng: random.Random) -> Batch:
        """Write a batch of short conversations without a document."""
        conversations = [
            _system_turn(rng) + _exchanges(rng.choices(corpus.SMALL_TALK, k=2))
            for _ in range(SMALL_TALK_BATCH)
        ]
        return self._to_batch(rng, conversations, 0)

    def _to_batch(self, rng: random.Random, conversations: list[list[Piece]], max_position: int) -> Batch:
        rows = [self._encode(pieces) for pieces in conversations]
        length = max(len(ids) for ids, _, _ in rows)
        ids = torch.full((len(rows), length), self._special[PAD])
        targets = torch.full((len(rows), length), IGNORED)
        is_first = torch.zeros((len(rows), length), dtype=torch.bool)
        for row, (row_ids, learned, firsts) in enumerate(rows):
            ids[row, : len(row_ids)] = torch.tensor(row_ids)
            predicting = torch.tensor(learned) - 1
            targets[row, predicting] = ids[row, predicting + 1]
            is_first[row, torch.tensor(firsts) - 1] = True
        return Batch(ids, _skipping_positions(rng, len(rows), length, max_position), targets, is_first)

    def _encode(self, pieces: list[Piece]) -> tuple[list[int], list[int], list[int]]:
        """Return the ids, the indices of the tokens to learn and those of the first ones of these in each piece."""
        ids = [self._special[BOS]]
        learned: list[int] = []
        firsts: list[int] = []
        encodings = self._tokenizer.backend_tokenizer.encode_batch(
            [text for text, _ in pieces], add_special_tokens=False
        )
        for (text, is_learned), encoding in zip(pieces, encodings, strict=True):
            start = len(ids)
            ids += encoding.ids
            if is_learned:
                learned += range(start, len(ids))
                firsts += [] if text == EOS else [start]
        return ids, learned, firsts


def _document_turns(rng: random.Random, stage: Stage) -> list[Piece]:
    text = corpus.write_training_text(
        rng, stage.num_facts, stage.num_fillers, stage.num_questions, stage.difficulty
    )
    exchanges = list(text.exchanges)
    if stage.is_varied and rng.random() < 0.25:
        exchanges.insert(0, (text.document, READ_ANSWER))
    else:
        exchanges[0] = (f"{text.document}\n\n{exchanges[0][0]}", exchanges[0][1])
    if stage.is_varied and rng.random() < 0.25:
        exchanges.insert(rng.randint(0, len(exchanges)), rng.choice(corpus.SMALL_TALK))
    return (_system_turn(rng) if stage.is_varied else []) + _exchanges(exchanges)


def _system_turn(rng: random.Random) -> list[Piece]:
    return (
        [(SYSTEM, False), (rng.choice(corpus.SYSTEM_PROMPTS), False), (EOS, False)]
        if rng.random() < 0.2
        else []
    )


def _exchanges(exchanges: list[tuple[str, str]]) -> list[Piece]:
    pieces = []
    for said, answer in exchanges:
        pieces += [
            (USER, False),
            (said, False),
            (EOS, False),
            (ASSISTANT, False),
            (answer, True),
            (EOS, True),
        ]
    return pieces


def _skipping_positions(rng: random.Random, num_rows: int, length: int, max_position: int) -> torch.Tensor:
    """Positions that skip ahead at up to four places in each row, in half of the rows."""
    positions = torch.arange(length).repeat(num_rows, 1)
    for row in range(num_rows):
        spare = max_position - length
        if spare <= 0 or rng.random() < 0.5:
            continue
        for _ in range(rng.randint(1, 4)):
            skip = rng.randint(0, spare)
            positions[row, rng.randrange(length) :] += skip
            spare -= skip
    return positions
