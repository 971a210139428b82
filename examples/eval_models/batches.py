"""From the suite's cases to batches of token ids, with what is to be learned of them and at which positions they stand."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from commands.eval.tasks.case import LengthError
from commands.eval.tasks.extraction import ExtractionTask
from commands.eval.tasks.suite import TASKS, case_source
from examples.eval_models.stages import Stage
from examples.eval_models.tokenizer import Style
from examples.eval_models.turns import Turn, turns

IGNORED = -100
CHAT_SHARE = 0.3
MOST_SKIPS = 4
NUM_RECORDS = (2, 8)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids, their positions, the next tokens to learn (else IGNORED) and which turn these belong to: each [sequence, position]."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    turn: torch.Tensor  # numbered from 0 through the batch
    task_of_turn: list[str]


class Writer:
    """Writes batches of cases, each asked several things."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, style: Style) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        self._style = style
        vocabulary = tokenizer.get_vocab()
        self._special: dict[str, int] = {
            token: vocabulary[token]
            for token in (style.bos, style.end, style.pad, style.user, style.assistant)
        }
        self._characters_a_token = {name: self._measure(name) for name in TASKS}

    def batch(self, rng: random.Random, stage: Stage) -> Batch:
        """Write a batch."""
        length = rng.choice(stage.lengths)
        names = rng.choices(
            tuple(stage.weights), tuple(stage.weights.values()), k=max(1, stage.num_tokens // length)
        )
        rows = [self._encode(rng, name, length) for name in names]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), longest), self._special[self._style.pad])
        targets = torch.full((len(rows), longest), IGNORED)
        turn = torch.zeros((len(rows), longest), dtype=torch.long)
        tasks: list[str] = []
        for row, (row_ids, spans) in enumerate(rows):
            ids[row, : len(row_ids)] = torch.tensor(row_ids)
            for start, end in spans:
                targets[row, start - 1 : end - 1] = ids[row, start:end]
                turn[row, start - 1 : end - 1] = len(tasks)
                tasks.append(names[row])
        return Batch(ids, _positions(rng, len(rows), longest, stage.max_position), targets, turn, tasks)

    def _encode(self, rng: random.Random, name: str, length: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return a row's ids, and where its answers stand, from start to before end."""
        case = self._make(rng, name, length)
        style, special = self._style, self._special
        is_chat = rng.random() < CHAT_SHARE
        ids = [special[style.bos]]
        spans: list[tuple[int, int]] = []
        context = case.context
        for turn in turns(case, rng):
            asked = self._asked(turn, context, is_chat)
            answer = [*self._ids(turn.answer), special[style.end]]
            if spans and len(ids) + len(asked) + len(answer) > 1.6 * length:
                break
            ids += asked
            spans.append((len(ids), len(ids) + len(answer)))
            ids += answer
            context = ""
        return ids, spans

    def _asked(self, turn: Turn, context: str, is_chat: bool) -> list[int]:
        if not is_chat:
            return self._ids(context + turn.question + turn.answer_prefix)
        user, end, assistant = (
            self._special[token] for token in (self._style.user, self._style.end, self._style.assistant)
        )
        return [user, *self._ids(context + turn.question), end, assistant, *self._ids(turn.answer_prefix)]

    def _make(self, rng: random.Random, name: str, length: int) -> Any:
        ratio = self._characters_a_token[name]
        # Short texts have as many records as long ones.
        task = ExtractionTask(num_records=rng.randint(*NUM_RECORDS)) if name == "text2json" else TASKS[name]
        source = case_source(name, rng.getrandbits(32), rng.getrandbits(32), "train")
        state = source.getstate()
        while True:
            try:
                return task.make(source, length, lambda text: int(len(text) / ratio))
            except LengthError:
                length += 64
                source.setstate(state)

    def _measure(self, name: str) -> float:
        prompt = TASKS[name].make(case_source(name, 0, 0, "train"), 1000, lambda text: len(text) // 4).prompt
        return len(prompt) / len(self._ids(prompt))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


class Batches(IterableDataset[Batch]):
    """The batches of a stage from a step on; each step's is drawn from a source of its own."""

    def __init__(self, writer: Writer, seed: int, stage: Stage, start: int) -> None:
        self._writer, self._seed, self._stage, self._start = writer, seed, stage, start

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self._start, self._stage.num_steps):
            yield self._writer.batch(random.Random(f"{self._seed}/{self._stage.name}/{step}"), self._stage)


def _positions(rng: random.Random, num_rows: int, length: int, max_position: int) -> torch.Tensor:
    """Positions that skip ahead at a few places in half of the rows, so that short texts teach far distances."""
    positions = torch.arange(length).repeat(num_rows, 1)
    for row in range(num_rows):
        spare = max_position - length
        if spare <= 0 or rng.random() < 0.5:
            continue
        for _ in range(rng.randint(1, MOST_SKIPS)):
            skip = rng.randint(0, spare)
            positions[row, rng.randrange(length) :] += skip
            spare -= skip
    return positions
