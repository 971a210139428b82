"""The cases of the evaluation suite as batches of token ids."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from commands.eval.tasks.case import LengthError
from commands.eval.tasks.extraction import ExtractionTask
from commands.eval.tasks.suite import TASKS, case_source
from examples.eval_models.stages import Stage
from examples.eval_models.tokenizer import Style
from examples.eval_models.turns import Turn, turns
from examples.training import batches

CHAT_SHARE = 0.3
MAX_LENGTH_SHARE = 1.6  # of a row, in the length of its context: no further turn makes it longer
NUM_RECORDS = (2, 8)


@dataclass(frozen=True)
class Batch(batches.Batch):
    """A batch with the turns that the targets belong to, for the accuracy of each task."""

    turn: torch.Tensor  # [sequence, position]: the index of the turn within the batch
    task_of_turn: list[str]


class Writer:
    """Writes batches of cases, each with several turns about its context."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, style: Style) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        self._style = style
        vocabulary = tokenizer.get_vocab()
        self._special: dict[str, int] = {
            token: vocabulary[token]
            for token in (style.bos, style.end, style.pad, style.user, style.assistant)
        }
        self._characters_per_token = {name: self._measure(name) for name in TASKS}

    def step_batch(self, seed: int, stage: Stage, step: int, total_steps: int) -> Batch:  # noqa: ARG002
        """Write the batch of a step."""
        return self.batch(random.Random(f"{seed}/{stage.name}/{step}"), stage)

    def batch(self, rng: random.Random, stage: Stage) -> Batch:
        """Write a batch."""
        length = rng.choice(stage.lengths)
        names = rng.choices(
            tuple(stage.weights), tuple(stage.weights.values()), k=max(1, stage.num_tokens // length)
        )
        rows = [self._encode(rng, name, length) for name in names]
        learned = [[index for span in spans for index in range(*span)] for _, spans in rows]
        ids, targets = batches.pad_rows(
            [row_ids for row_ids, _ in rows], learned, self._special[self._style.pad]
        )
        turn = torch.zeros_like(ids)
        tasks: list[str] = []
        for row, (_, spans) in enumerate(rows):
            for start, end in spans:
                turn[row, start - 1 : end - 1] = len(tasks)
                tasks.append(names[row])
        num_rows, longest = ids.shape
        positions = batches.skipping_positions(rng, num_rows, longest, stage.max_position)
        return Batch(ids, positions, targets, turn, tasks)

    def _encode(self, rng: random.Random, name: str, length: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return a row's ids, and the start and the end (exclusive) of each answer."""
        case = self._make(rng, name, length)
        style = self._style
        special = self._special
        is_chat = rng.random() < CHAT_SHARE
        ids = [special[style.bos]]
        spans: list[tuple[int, int]] = []
        context = case.context
        for turn in turns(case, rng):
            question = self._question(turn, context, is_chat)
            answer = [*self._ids(turn.answer), special[style.end]]
            if spans and len(ids) + len(question) + len(answer) > MAX_LENGTH_SHARE * length:
                break
            ids += question
            spans.append((len(ids), len(ids) + len(answer)))
            ids += answer
            context = ""
        return ids, spans

    def _question(self, turn: Turn, context: str, is_chat: bool) -> list[int]:
        if not is_chat:
            return self._ids(context + turn.question + turn.answer_prefix)
        user, end, assistant = (
            self._special[token] for token in (self._style.user, self._style.end, self._style.assistant)
        )
        return [user, *self._ids(context + turn.question), end, assistant, *self._ids(turn.answer_prefix)]

    def _make(self, rng: random.Random, name: str, length: int) -> Any:
        ratio = self._characters_per_token[name]
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
