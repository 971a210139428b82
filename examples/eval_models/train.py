"""Train an evaluation model from nothing: `python -m examples.eval_models.train llama --out DIR`.

Text is written by a process of its own, ahead of the training, from sources that evaluation never draws from. The run is a function of its
seed. A checkpoint is kept in DIR, from which `--resume` goes on.
"""

import argparse
import copy
import json
import math
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from examples.demo_model.model import hidden_states
from examples.eval_models.batches import IGNORED, Batch, Batches, Writer
from examples.eval_models.model import build_model, circuit_parameters, shaped_parameters
from examples.eval_models.second_layer import change_second_layer
from examples.eval_models.stages import STAGES, Stage
from examples.eval_models.tokenizer import LLAMA, QWEN, build_tokenizer

STYLES = {"llama": LLAMA, "qwen": QWEN}
WARMUP_STEPS = 20
SHAPED_SHARE = 0.2  # of the learning rate, for the weights that start as a circuit
ACCURACY_DECAY = 0.9
CHECKPOINT_SECONDS = 120.0
NOTE_EVERY = 10


@dataclass
class Progress:
    """Where training stands; saved with each checkpoint."""

    stage: int = 0
    step: int = 0  # within the stage
    total_steps: int = 0
    total_tokens: int = 0
    seconds: float = 0.0
    exact: dict[str, float] = field(
        default_factory=dict
    )  # running mean of whole answers that are right, by task
    curve: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """The model, its optimizer and where training stands, kept together so that they are saved and restored together."""

    def __init__(self, family: str, seed: int, stages: tuple[Stage, ...], out: Path) -> None:
        torch.manual_seed(seed)
        self.seed, self.stages, self.out = seed, stages, out
        self.tokenizer = build_tokenizer(STYLES[family])
        self.writer = Writer(self.tokenizer, STYLES[family])
        self.model = build_model(family, self.tokenizer)
        shaped = shaped_parameters(self.model)
        others = [
            parameter for parameter in self.model.parameters() if all(parameter is not one for one in shaped)
        ]
        groups = [{"params": shaped, "share": SHAPED_SHARE}, {"params": others, "share": 1.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=stages[0].rate, betas=(0.9, 0.98), weight_decay=0.01)
        self.progress = Progress()

    def run(self) -> None:
        """Train to the end of the last stage."""
        while self.progress.stage < len(self.stages):
            self._run_stage(self.stages[self.progress.stage])
            self.progress.stage += 1
            self.progress.step = 0
            self.save()

    def save(self) -> None:
        """Write the checkpoint, the model and the curve. A checkpoint replaces the last one whole."""
        self.out.mkdir(parents=True, exist_ok=True)
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
        rounded: Any = copy.deepcopy(self.model)
        rounded.to(torch.bfloat16).save_pretrained(self.out / "model")
        self.tokenizer.save_pretrained(self.out / "model")
        (self.out / "curve.json").write_text(json.dumps(self.progress.curve, indent=0) + "\n")

    def restore(self) -> None:
        """Go back to the last checkpoint."""
        state = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])

    def _run_stage(self, stage: Stage) -> None:
        progress = self.progress
        saved = time.monotonic()
        if stage.changes_second_layer and not progress.step:
            change_second_layer(self.model, self.tokenizer)  # type: ignore[arg-type]
        for parameter in circuit_parameters(self.model):
            parameter.requires_grad_(not stage.changes_second_layer)
        loader = DataLoader(
            Batches(self.writer, self.seed, stage, progress.step),
            batch_size=None,
            num_workers=1,
            prefetch_factor=8,
        )
        with tqdm(
            total=stage.num_steps, initial=progress.step, desc=stage.name, unit="step", mininterval=5.0
        ) as bar:
            for batch in loader:
                start = time.monotonic()
                loss = self._step(stage, batch)
                progress.seconds += time.monotonic() - start
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", exact=f"{_mean(progress.exact):.3f}", refresh=False)
                if progress.total_steps % NOTE_EVERY == 0:
                    self._note(stage, loss)
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    self.save()
                    saved = time.monotonic()

    def _step(self, stage: Stage, batch: Batch) -> float:
        progress = self.progress
        rate = stage.rate + (stage.final_rate - stage.rate) * progress.step / stage.num_steps
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * rate * min(1.0, (progress.total_steps + 1) / WARMUP_STEPS)
        answered = batch.targets != IGNORED
        targets = batch.targets[answered]
        row = torch.arange(len(batch.ids))[:, None].expand_as(batch.ids)[answered]
        weight = (
            torch.bincount(row).clamp(min=1).sqrt().reciprocal()[row]
        )  # long answers count for more, and not for all
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = hidden_states(self.model, batch.ids, batch.positions)  # type: ignore[arg-type]
            logits = self.model.lm_head(hidden[answered]).float()  # [answer token, vocabulary]
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        progress.step += 1
        progress.total_steps += 1
        progress.total_tokens += batch.ids.numel()
        self._measure(batch, batch.turn[answered], logits.argmax(-1) == targets)
        return loss.item()

    def _measure(self, batch: Batch, turn: torch.Tensor, right: torch.Tensor) -> None:
        """Move each task's running mean by this batch's answers."""
        whole = torch.ones(len(batch.task_of_turn), dtype=torch.bool).scatter_reduce(0, turn, right, "prod")
        exact = defaultdict(list)
        for task, is_right in zip(batch.task_of_turn, whole.tolist(), strict=True):
            exact[task].append(is_right)
        for task, answers in exact.items():
            share = sum(answers) / len(answers)
            self.progress.exact[task] = (
                ACCURACY_DECAY * self.progress.exact.get(task, share) + (1 - ACCURACY_DECAY) * share
            )

    def _note(self, stage: Stage, loss: float) -> None:
        progress = self.progress
        exact = {task: round(progress.exact[task], 3) for task in sorted(progress.exact)}
        place = {
            "step": progress.total_steps,
            "stage": stage.name,
            "tokens": progress.total_tokens,
            "seconds": round(progress.seconds, 1),
        }
        progress.curve.append({**place, "loss": round(loss, 4), "exact": exact})


def _mean(exact: dict[str, float]) -> float:
    return sum(exact.values()) / len(exact) if exact else math.nan


def draw_curve(curve: list[dict[str, Any]], path: Path) -> None:
    """Draw each task's running share of exact answers over the tokens seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6))
    for task in sorted({task for point in curve for task in point["exact"]}):
        points = [point for point in curve if task in point["exact"]]
        axes.plot(
            [point["tokens"] / 1e6 for point in points],
            [point["exact"][task] for point in points],
            label=task,
        )
    axes.set(
        xlabel="tokens seen (millions)",
        ylabel="running share of exact answers, fresh training text",
        ylim=(0, 1.02),
    )
    axes.legend(fontsize="small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=STYLES)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for the checkpoint, the curve and model/, the trained model",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments.family, arguments.seed, STAGES[arguments.family], arguments.out)
    if arguments.resume:
        trainer.restore()
    trainer.run()
    draw_curve(trainer.progress.curve, arguments.out / "curve.png")


if __name__ == "__main__":
    main()
