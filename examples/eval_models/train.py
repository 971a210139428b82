"""Train an evaluation model from nothing: `python -m examples.eval_models.train llama --out DIR`.

The text comes from sources that evaluation never draws from. A checkpoint is kept in DIR, and `--resume`
continues from it.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from examples.eval_models.batches import Batch, Writer
from examples.eval_models.model import build_model, circuit_parameters, shaped_parameters
from examples.eval_models.second_layer import change_second_layer
from examples.eval_models.stages import STAGES, Stage
from examples.eval_models.tokenizer import LLAMA, QWEN, build_tokenizer
from examples.training.command import draw_curve, train, training_parser
from examples.training.trainer import Point, Prediction, Progress, Trainer, are_answers_right

STYLES = {"llama": LLAMA, "qwen": QWEN}
SHAPED_SHARE = 0.2  # of the learning rate, for the weights that start as a circuit
ACCURACY_DECAY = 0.9


@dataclass
class EvalProgress(Progress):
    """Progress with the share of whole answers that are right, a running mean by task."""

    exact: dict[str, float] = field(default_factory=dict)


class EvalTrainer(Trainer[Stage, Batch, EvalProgress]):
    """Trains an evaluation model of a family, "llama" or "qwen"."""

    warmup_steps = 20
    curve_steps = 10
    export_dtype = torch.bfloat16

    def __init__(self, family: str, seed: int, stages: tuple[Stage, ...], out: Path) -> None:
        torch.manual_seed(seed)
        tokenizer = build_tokenizer(STYLES[family])
        writer = Writer(tokenizer, STYLES[family])
        model = build_model(family, tokenizer)
        shaped = shaped_parameters(model)
        others = [
            parameter for parameter in model.parameters() if all(parameter is not one for one in shaped)
        ]
        super().__init__(
            seed,
            stages,
            out,
            tokenizer=tokenizer,
            writer=writer,
            model=model,
            parameters=[{"params": shaped, "share": SHAPED_SHARE}, {"params": others}],
            progress=EvalProgress(),
        )

    def begin_stage(self, stage: Stage) -> None:
        """Change the second layer if the stage does, and freeze the parameters that the change relies on."""
        if stage.changes_second_layer and not self.progress.step:
            change_second_layer(cast(LlamaForCausalLM, self.model), self.tokenizer)
        for parameter in circuit_parameters(self.model):
            parameter.requires_grad_(not stage.changes_second_layer)

    def loss(self, stage: Stage, batch: Batch, prediction: Prediction) -> torch.Tensor:  # noqa: ARG002
        """Return the mean loss of the answer tokens, weighted by row.

        With equal weights for tokens, rows with long answers would dominate. With equal weights for rows,
        long answers would count too little. So a row of n answer tokens has the weight √n.
        """
        row = torch.arange(len(batch.ids))[:, None].expand_as(batch.ids)[prediction.is_answer]
        weight = torch.bincount(row).clamp(min=1).sqrt().reciprocal()[row]
        losses = cross_entropy(prediction.logits, prediction.targets, reduction="none")
        return (losses * weight).sum() / weight.sum()

    def measure(self, batch: Batch, prediction: Prediction) -> None:
        """Update the running mean of each task in the batch."""
        answer = batch.turn[prediction.is_answer]
        answers = are_answers_right(prediction.is_right, answer, len(batch.task_of_turn))
        exact = defaultdict(list)
        for task, is_right in zip(batch.task_of_turn, answers.tolist(), strict=True):
            exact[task].append(is_right)
        means = self.progress.exact
        for task, of_task in exact.items():
            share = sum(of_task) / len(of_task)
            means[task] = ACCURACY_DECAY * means.get(task, share) + (1 - ACCURACY_DECAY) * share

    def figures(self) -> dict[str, str]:
        """Return the mean over the tasks."""
        exact = self.progress.exact
        mean = sum(exact.values()) / len(exact) if exact else math.nan
        return {"exact": f"{mean:.3f}"}

    def curve_point(self) -> Point | None:
        """Return the running means."""
        exact = self.progress.exact
        return {"exact": {task: round(exact[task], 3) for task in sorted(exact)}}


def main() -> None:
    """Train and draw the curve."""
    parser = training_parser(__doc__, threads=1)
    parser.add_argument("family", choices=STYLES)
    arguments = parser.parse_args()
    family: str = arguments.family
    curve = train(lambda: EvalTrainer(family, arguments.seed, STAGES[family], arguments.out), arguments)
    series = {
        task: {point["tokens"]: point["exact"][task] for point in curve if task in point["exact"]}
        for task in sorted({task for point in curve for task in point["exact"]})
    }
    draw_curve(
        curve, series, "running share of exact answers, fresh training text", arguments.out / "curve.png"
    )


if __name__ == "__main__":
    main()
