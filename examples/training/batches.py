"""Batches of token ids for training, and the loader that writes them ahead of the training."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from examples.training.stage import Stage

IGNORED = -100  # the target of a position that is not learned, as `cross_entropy` takes it
MAX_SKIPS = 4
PREFETCHED_BATCHES = 8


@dataclass(frozen=True)
class Batch:
    """Token ids, their positions and the next tokens to learn (else IGNORED): each [sequence, position]."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor


StageT_contra = TypeVar("StageT_contra", bound=Stage, contravariant=True)
StageT = TypeVar("StageT", bound=Stage)
BatchT = TypeVar("BatchT", bound=Batch)
BatchT_co = TypeVar("BatchT_co", bound=Batch, covariant=True)


class Writer(Protocol[StageT_contra, BatchT_co]):
    """Writes the training text of a model as batches."""

    def step_batch(self, seed: int, stage: StageT_contra, step: int, total_steps: int) -> BatchT_co:
        """Write the batch of a step, which depends on nothing but the arguments.

        `step` counts within the stage, `total_steps` over all stages.
        """
        ...


class _StageBatches(IterableDataset[BatchT], Generic[StageT, BatchT]):
    """The batches of a stage from a step on."""

    def __init__(
        self, writer: Writer[StageT, BatchT], seed: int, stage: StageT, step: int, total_steps: int
    ) -> None:
        self._writer = writer
        self._seed = seed
        self._stage = stage
        self._first_step = step
        self._first_total = total_steps

    def __iter__(self) -> Iterator[BatchT]:
        for offset in range(self._stage.max_steps - self._first_step):
            yield self._writer.step_batch(
                self._seed, self._stage, self._first_step + offset, self._first_total + offset
            )


def load_batches(
    writer: Writer[StageT, BatchT], seed: int, stage: StageT, step: int, total_steps: int
) -> DataLoader[BatchT]:
    """Return the batches of a stage from a step on, which another process writes ahead of the training."""
    return DataLoader(
        _StageBatches(writer, seed, stage, step, total_steps),
        batch_size=None,
        num_workers=1,
        prefetch_factor=PREFETCHED_BATCHES,
    )


def pad_rows(
    rows: Sequence[list[int]], learned: Sequence[list[int]], pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets of rows that are padded to one length: each [sequence, position].

    `learned` holds each row's indices of tokens to learn. Each is the target of the token before it.
    """
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), pad)
    targets = torch.full((len(rows), length), IGNORED)
    for index, (row, row_learned) in enumerate(zip(rows, learned, strict=True)):
        ids[index, : len(row)] = torch.tensor(row)
        predicting = torch.tensor(row_learned) - 1
        targets[index, predicting] = ids[index, predicting + 1]
    return ids, targets


def skipping_positions(rng: random.Random, num_rows: int, length: int, max_position: int) -> torch.Tensor:
    """Return positions [sequence, position] that skip ahead at a few indices of half of the rows.

    Skips teach far distances in short texts. No position exceeds `max_position`.
    """
    positions = torch.arange(length).repeat(num_rows, 1)
    for row in range(num_rows):
        spare = max_position - length
        if spare <= 0 or rng.random() < 0.5:
            continue
        for _ in range(rng.randint(1, MAX_SKIPS)):
            skip = rng.randint(0, spare)
            positions[row, rng.randrange(length) :] += skip
            spare -= skip
    return positions
