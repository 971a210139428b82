"""Train the demo model from nothing: `python -m examples.demo_model.train --out DIR`.

The curriculum grows the vocabulary, then the number of facts, then the length. Each stage begins when the one
before is learned. The model first finds the circuit where that is easy: one layer marks each value with its
owner, the next looks up the name of the question. Later stages only widen the circuit. Without stages the
model merely learns which values exist. The figure to watch is the accuracy of an answer's first token.

A checkpoint is kept in DIR, and `--resume` continues from it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from examples.demo_model.batches import Batch, Writer
from examples.demo_model.model import build_model
from examples.demo_model.stages import STAGES, Stage
from examples.demo_model.tokenizer import build_tokenizer
from examples.training.command import draw_curve, train, training_parser
from examples.training.trainer import Point, Prediction, Progress, Trainer, are_answers_right

ACCURACY_DECAY = 0.95
TEXT_WEIGHT = 0.05


@dataclass
class DemoProgress(Progress):
    """Progress with the running means, which begin at 0 with each stage, so that no lucky batch ends one."""

    accuracy: float = 0.0  # of first answer tokens
    exact: float = 0.0  # of whole answers
    num_measured: int = 0  # batches in these means


class DemoTrainer(Trainer[Stage, Batch, DemoProgress]):
    """Trains the demo model."""

    warmup_steps = 100
    curve_steps = 20

    def __init__(self, seed: int, stages: tuple[Stage, ...], out: Path) -> None:
        torch.manual_seed(seed)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        writer = Writer(tokenizer)
        self._pad = writer.pad
        super().__init__(
            seed,
            stages,
            out,
            tokenizer=tokenizer,
            writer=writer,
            model=model,
            parameters=list(model.parameters()),
            progress=DemoProgress(),
        )

    def loss(self, stage: Stage, batch: Batch, prediction: Prediction) -> torch.Tensor:
        """Return the loss of the answers, and of a sample of the text, so that free completion gives text."""
        loss = cross_entropy(prediction.logits, prediction.targets)
        if not stage.is_varied:
            return loss
        hidden = prediction.hidden[:, batch.text_indices].flatten(0, 1)
        following = batch.ids[:, batch.text_indices + 1].flatten()
        text_logits = self.model.lm_head(hidden).float()
        return loss + TEXT_WEIGHT * cross_entropy(text_logits, following, ignore_index=self._pad)

    def measure(self, batch: Batch, prediction: Prediction) -> None:
        """Update the running means, from documents of full size only."""
        if not batch.is_measured:
            return
        is_right = prediction.is_right
        is_first = batch.is_first[prediction.is_answer]
        answers = are_answers_right(is_right, is_first.cumsum(0) - 1, int(is_first.sum()))
        progress = self.progress
        progress.num_measured += 1
        progress.accuracy = _running_mean(progress.accuracy, is_right[is_first].float().mean().item())
        progress.exact = _running_mean(progress.exact, answers.float().mean().item())

    def figures(self) -> dict[str, str]:
        """Return both running means."""
        return {"first": f"{self.progress.accuracy:.3f}", "exact": f"{self.progress.exact:.3f}"}

    def curve_point(self) -> Point | None:
        """Return the running means, corrected for their start at 0."""
        progress = self.progress
        if progress.num_measured == 0:
            return None
        weight = 1.0 - ACCURACY_DECAY**progress.num_measured
        return {
            "first_token_accuracy": round(progress.accuracy / weight, 4),
            "exact_accuracy": round(progress.exact / weight, 4),
        }

    def is_learned(self, stage: Stage) -> bool:
        """Return whether the accuracy has reached the stage's target."""
        return self.progress.accuracy >= stage.target

    def end_stage(self, stage: Stage, loss: float) -> None:
        """Add a last point to the curve and begin new means."""
        self.add_curve_point(stage, loss)
        self.progress.accuracy = 0.0
        self.progress.exact = 0.0
        self.progress.num_measured = 0


def _running_mean(mean: float, value: float) -> float:
    return ACCURACY_DECAY * mean + (1 - ACCURACY_DECAY) * value


def main() -> None:
    """Train and draw the curve."""
    arguments = training_parser(__doc__, threads=2).parse_args()
    curve = train(lambda: DemoTrainer(arguments.seed, STAGES, arguments.out), arguments)
    series = {
        label: {point["tokens"]: point[key] for point in curve}
        for label, key in (
            ("first answer token", "first_token_accuracy"),
            ("whole answer", "exact_accuracy"),
        )
    }
    draw_curve(curve, series, "running accuracy on fresh training text", arguments.out / "curve.png")


if __name__ == "__main__":
    main()
