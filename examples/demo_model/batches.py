"""The demo model's training text as batches of token ids."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from examples.demo_model import corpus
from examples.demo_model.stages import Stage
from examples.demo_model.tokenizer import ASSISTANT, BOS, EOS, PAD, SPECIAL_TOKENS, SYSTEM, USER
from examples.training import batches

SMALL_TALK_BATCH = 32
SMALL_TALK_STEPS = 8  # one step in as many is small talk
TEXT_SAMPLES = 64
READ_ANSWER = "I have read the text."

# A piece of text and whether the model learns to write it. Each special token is a piece.
Piece = tuple[str, bool]


@dataclass(frozen=True)
class Batch(batches.Batch):
    """A batch with the fields that the demo model's loss and accuracy need."""

    is_first: torch.Tensor  # [sequence, position]: whether the target begins an answer
    text_indices: torch.Tensor  # indices of positions whose next token is also predicted
    is_measured: bool  # whether it has documents of the stage's full size


class Writer:
    """Turns conversations into token ids with targets."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        backend: Any = tokenizer.backend_tokenizer
        self._special: dict[str, int] = {token: backend.token_to_id(token) for token in SPECIAL_TOKENS}

    @property
    def pad(self) -> int:
        """The id that pads short rows."""
        return self._special[PAD]

    def step_batch(self, seed: int, stage: Stage, step: int, total_steps: int) -> Batch:  # noqa: ARG002
        """Write the batch of a step: documents with questions, or small talk."""
        rng = corpus.training_stream(seed, total_steps)
        shrink = 2 ** rng.randint(0, stage.max_shrink.bit_length() - 1)
        if stage.is_varied and total_steps % SMALL_TALK_STEPS == SMALL_TALK_STEPS - 1:
            return self.small_talk_batch(rng)
        if shrink == 1:
            return self.batch(rng, stage)
        return self.batch(rng, stage.shrunk(shrink), is_measured=False)

    def batch(self, rng: random.Random, stage: Stage, is_measured: bool = True) -> Batch:
        """Write a batch of documents with questions."""
        conversations = [_document_turns(rng, stage) for _ in range(stage.batch_size)]
        return self._to_batch(rng, conversations, stage.max_position, is_measured)

    def small_talk_batch(self, rng: random.Random) -> Batch:
        """Write a batch of short conversations without a document."""
        conversations = [
            _system_turn(rng) + _exchanges(rng.choices(corpus.SMALL_TALK, k=2))
            for _ in range(SMALL_TALK_BATCH)
        ]
        return self._to_batch(rng, conversations, max_position=0, is_measured=False)

    def _to_batch(
        self, rng: random.Random, conversations: list[list[Piece]], max_position: int, is_measured: bool
    ) -> Batch:
        rows = [self._encode(pieces) for pieces in conversations]
        ids, targets = batches.pad_rows(
            [row_ids for row_ids, _, _ in rows], [learned for _, learned, _ in rows], self.pad
        )
        is_first = torch.zeros_like(ids, dtype=torch.bool)
        for row, (_, _, firsts) in enumerate(rows):
            is_first[row, torch.tensor(firsts) - 1] = True
        num_rows, length = ids.shape
        positions = batches.skipping_positions(rng, num_rows, length, max_position)
        text_indices = rng.sample(range(length - 1), min(TEXT_SAMPLES, length - 1))
        return Batch(ids, positions, targets, is_first, torch.tensor(text_indices), is_measured)

    def _encode(self, pieces: list[Piece]) -> tuple[list[int], list[int], list[int]]:
        """Return ids, the indices of the tokens to learn, and the indices at which a learned text begins."""
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
    if rng.random() >= 0.2:
        return []
    return [(SYSTEM, False), (rng.choice(corpus.SYSTEM_PROMPTS), False), (EOS, False)]


def _exchanges(exchanges: list[tuple[str, str]]) -> list[Piece]:
    pieces = []
    for message, answer in exchanges:
        pieces += [
            (USER, False),
            (message, False),
            (EOS, False),
            (ASSISTANT, False),
            (answer, True),
            (EOS, True),
        ]
    return pieces
