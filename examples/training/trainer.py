"""The training loop with its checkpoints, which every recipe shares.

A run is a function of its seed: each batch is drawn from the seed and the step. So a resumed run equals an
unbroken one.
"""

import copy
import json
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from examples.training.batches import IGNORED, BatchT, StageT, Writer, load_batches
from examples.training.model import Model, hidden_states

CHECKPOINT_SECONDS = 60.0

Point = dict[str, Any]  # of the learning curve


@dataclass
class Progress:
    """The progress of training, which each checkpoint holds."""

    stage: int = 0
    step: int = 0  # within the stage
    total_steps: int = 0
    total_tokens: int = 0
    seconds: float = 0.0
    curve: list[Point] = field(default_factory=list)


ProgressT = TypeVar("ProgressT", bound=Progress)


@dataclass(frozen=True)
class Prediction:
    """The model's output for a batch."""

    hidden: torch.Tensor  # [sequence, position, hidden]
    is_answer: torch.Tensor  # [sequence, position]: where a token is learned
    logits: torch.Tensor  # [answer token, vocabulary]
    targets: torch.Tensor  # [answer token]

    @property
    def is_right(self) -> torch.Tensor:
        """Whether the likeliest token is the right one.  # [answer token]"""
        return self.logits.argmax(-1) == self.targets


class Trainer(ABC, Generic[StageT, BatchT, ProgressT]):
    """The model, its optimizer and the progress, kept together so that a checkpoint holds all of them.

    A recipe seeds torch before it makes the model. `parameters` are parameters or groups of them; the
    learning rate of a group is multiplied by its "share" (1 by default).
    """

    warmup_steps: ClassVar[int]
    curve_steps: ClassVar[int]  # steps from one point of the curve to the next
    export_dtype: ClassVar[torch.dtype] = torch.float32

    def __init__(
        self,
        seed: int,
        stages: tuple[StageT, ...],
        out: Path,
        *,
        tokenizer: PreTrainedTokenizerFast,
        writer: Writer[StageT, BatchT],
        model: Model,
        parameters: list[Any],
        progress: ProgressT,
    ) -> None:
        self.seed = seed
        self.stages = stages
        self.out = out
        self.tokenizer = tokenizer
        self.writer = writer
        self.model = model
        self.optimizer = torch.optim.AdamW(
            parameters, lr=stages[0].rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.progress = progress

    @abstractmethod
    def loss(self, stage: StageT, batch: BatchT, prediction: Prediction) -> torch.Tensor:
        """Return the loss of a batch. Runs under autocast."""

    @abstractmethod
    def measure(self, batch: BatchT, prediction: Prediction) -> None:
        """Update the progress with the batch's answers."""

    @abstractmethod
    def figures(self) -> dict[str, str]:
        """Return the measured figures, to be displayed beside the loss."""

    @abstractmethod
    def curve_point(self) -> Point | None:
        """Return the measured figures for a point of the curve, or None while there are none."""

    def begin_stage(self, stage: StageT) -> None:
        """Prepare the model for the steps of a stage that are left."""

    def is_learned(self, stage: StageT) -> bool:  # noqa: ARG002
        """Return whether the stage may end before its last step."""
        return False

    def end_stage(self, stage: StageT, loss: float) -> None:
        """Finish a stage whose last batch had this loss."""

    def run(self) -> None:
        """Train to the end of the last stage."""
        while self.progress.stage < len(self.stages):
            self._run_stage(self.stages[self.progress.stage])
            self.progress.stage += 1
            self.progress.step = 0
            self.save()

    def save(self) -> None:
        """Write the checkpoint, the exported model and the curve."""
        self.out.mkdir(parents=True, exist_ok=True)
        # The last checkpoint is replaced only once the new one is complete.
        partial = self.out / "checkpoint.partial"
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": asdict(self.progress),
            },
            partial,
        )
        partial.replace(self.out / "checkpoint.pt")
        exported: Any = copy.deepcopy(self.model)
        exported.to(self.export_dtype).save_pretrained(self.out / "model")
        self.tokenizer.save_pretrained(self.out / "model")
        (self.out / "curve.json").write_text(json.dumps(self.progress.curve, indent=0) + "\n")

    def restore(self) -> None:
        """Load the last checkpoint."""
        state = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = type(self.progress)(**state["progress"])

    def add_curve_point(self, stage: StageT, loss: float) -> None:
        """Add a point to the curve, unless nothing is measured yet."""
        measured = self.curve_point()
        if measured is None:
            return
        progress = self.progress
        progress.curve.append(
            {
                "step": progress.total_steps,
                "stage": stage.name,
                "tokens": progress.total_tokens,
                "seconds": round(progress.seconds, 1),
                "loss": round(loss, 4),
                **measured,
            }
        )

    def _run_stage(self, stage: StageT) -> None:
        progress = self.progress
        saved = time.monotonic()
        self.begin_stage(stage)
        batches = load_batches(self.writer, self.seed, stage, progress.step, progress.total_steps)
        loss = 0.0
        with tqdm(
            total=stage.max_steps, initial=progress.step, desc=stage.name, unit="step", mininterval=2.0
        ) as bar:
            for batch in batches:
                start = time.monotonic()
                loss = self._step(stage, batch)
                progress.seconds += time.monotonic() - start
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", **self.figures(), refresh=False)
                if progress.total_steps % self.curve_steps == 0:
                    self.add_curve_point(stage, loss)
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    self.save()
                    saved = time.monotonic()
                if self.is_learned(stage):
                    break
        self.end_stage(stage, loss)

    def _step(self, stage: StageT, batch: BatchT) -> float:
        progress = self.progress
        rate = stage.rate + (stage.final_rate - stage.rate) * progress.step / stage.max_steps
        warmup = min(1.0, (progress.total_steps + 1) / self.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("share", 1.0) * rate * warmup
        is_answer = batch.targets != IGNORED
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = hidden_states(self.model, batch.ids, batch.positions)
            logits = self.model.lm_head(hidden[is_answer]).float()
            prediction = Prediction(hidden, is_answer, logits, batch.targets[is_answer])
            loss = self.loss(stage, batch, prediction)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        progress.step += 1
        progress.total_steps += 1
        progress.total_tokens += batch.ids.numel()
        self.measure(batch, prediction)
        return loss.item()


def are_answers_right(is_right: torch.Tensor, answer: torch.Tensor, num_answers: int) -> torch.Tensor:
    """Return for each answer whether all its tokens are right.  # [answer]

    Both tensors are [answer token]; `answer` holds the index of the answer that the token belongs to.
    """
    return torch.ones(num_answers, dtype=torch.bool).scatter_reduce(0, answer, is_right, "prod")
