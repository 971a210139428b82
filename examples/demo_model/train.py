"""Train the demo model from nothing: `python -m examples.demo_model.train --out DIR`.

The curriculum grows the vocabulary, then the number of facts, then the length, and begins each stage when the one before is learned: the
model first finds the circuit (one layer tells each value whose it is, the next looks the asked name up) where it is easy, and then only
widens it. Begun with everything at once it merely learns which values there are. What to watch is the accuracy of an answer's first token.

The run is a function of its seed: each step draws its text from a stream of its own. A checkpoint is kept in DIR, from which `--resume`
goes on.
"""

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from tqdm import tqdm

from examples.demo_model import corpus
from examples.demo_model.batches import IGNORED, Writer
from examples.demo_model.model import build_model, export, hidden_states
from examples.demo_model.stages import STAGES, Stage
from examples.demo_model.tokenizer import build_tokenizer

WARMUP_STEPS = 100
SMALL_TALK_EVERY = 8
ACCURACY_DECAY = 0.95
CHECKPOINT_SECONDS = 60.0
TEXT_PLACES, TEXT_WEIGHT = 64, 0.05


@dataclass
class Progress:
    """Where training stands; saved with each checkpoint."""

    stage: int = 0
    step: int = 0  # within the stage
    total_steps: int = 0
    total_tokens: int = 0
    seconds: float = 0.0
    accuracy: float = 0.0  # running mean for first answer tokens; begins at 0 with each stage, so that none ends after a lucky batch
    exact: float = 0.0  # the same for whole answers
    num_measured: int = 0  # batches that went into these: those with documents of the stage's full size
    curve: list[dict[str, float | int | str]] = field(default_factory=list)


class Trainer:
    """The model, its optimizer and where training stands, kept together so that they are saved and restored together."""

    def __init__(self, seed: int, stages: tuple[Stage, ...], out: Path) -> None:
        torch.manual_seed(seed)
        self.seed, self.stages, self.out = seed, stages, out
        self.tokenizer = build_tokenizer()
        self.writer = Writer(self.tokenizer)
        self.model = build_model(self.tokenizer)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.stages[0].rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.progress = Progress()

    def run(self) -> None:
        """Train to the end of the last stage."""
        while self.progress.stage < len(self.stages):
            self._run_stage(self.stages[self.progress.stage])
            self.progress.stage += 1
            self.progress.step = 0
            self.progress.accuracy = self.progress.exact = 0.0
            self.progress.num_measured = 0
            self.save()

    def save(self) -> None:
        """Write the checkpoint, the exported model and the curve. A checkpoint replaces the last one whole."""
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
        export(self.model, self.tokenizer, self.out / "model")
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
        with tqdm(
            total=stage.max_steps, initial=progress.step, desc=stage.name, unit="step", mininterval=2.0
        ) as bar:
            while progress.step < stage.max_steps:
                start = time.monotonic()
                loss = self._step(stage)
                progress.seconds += time.monotonic() - start
                bar.update()
                bar.set_postfix(
                    loss=f"{loss:.3f}",
                    first=f"{progress.accuracy:.3f}",
                    exact=f"{progress.exact:.3f}",
                    refresh=False,
                )
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    self.save()
                    saved = time.monotonic()
                if progress.accuracy >= stage.target:
                    break
        self._note(stage, loss)

    def _step(self, stage: Stage) -> float:
        progress = self.progress
        rng = corpus.training_stream(self.seed, progress.total_steps)
        talks = stage.is_varied and progress.total_steps % SMALL_TALK_EVERY == SMALL_TALK_EVERY - 1
        shrink = 2 ** rng.randint(0, stage.max_shrink.bit_length() - 1)
        batch = (
            self.writer.small_talk_batch(rng)
            if talks
            else self.writer.batch(rng, stage.shrunk(shrink) if shrink > 1 else stage)
        )
        rate = stage.rate + (stage.final_rate - stage.rate) * progress.step / stage.max_steps
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (progress.total_steps + 1) / WARMUP_STEPS)
        answered = batch.targets != IGNORED
        targets = batch.targets[answered]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = hidden_states(self.model, batch.ids, batch.positions)
            logits = self.model.lm_head(hidden[answered]).float()  # [answer token, vocabulary]
            loss = torch.nn.functional.cross_entropy(logits, targets)
            if stage.is_varied:
                loss = loss + TEXT_WEIGHT * self._text_loss(hidden, batch.ids, rng)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        progress.step += 1
        progress.total_steps += 1
        progress.total_tokens += batch.ids.numel()
        if not talks and shrink == 1:
            right = logits.argmax(-1) == targets
            first = batch.is_first[answered]
            whole = torch.ones(int(first.sum()), dtype=torch.bool).scatter_reduce(
                0, first.cumsum(0) - 1, right, "prod"
            )
            progress.num_measured += 1
            progress.accuracy = _running_mean(progress.accuracy, right[first].float().mean().item())
            progress.exact = _running_mean(progress.exact, whole.float().mean().item())
        if progress.total_steps % 20 == 0:
            self._note(stage, loss.item())
        return loss.item()

    def _text_loss(self, hidden: torch.Tensor, ids: torch.Tensor, rng: random.Random) -> torch.Tensor:
        """The loss of predicting the text itself at a few places, so that free completion gives text like the documents."""
        places = torch.tensor(rng.sample(range(ids.shape[1] - 1), min(TEXT_PLACES, ids.shape[1] - 1)))
        logits = self.model.lm_head(hidden[:, places].flatten(0, 1)).float()
        return torch.nn.functional.cross_entropy(
            logits, ids[:, places + 1].flatten(), ignore_index=self.writer.pad
        )

    def _note(self, stage: Stage, loss: float) -> None:
        """Add a point to the curve, the running means corrected for their start at 0."""
        progress = self.progress
        if progress.num_measured == 0:
            return
        weight = 1.0 - ACCURACY_DECAY**progress.num_measured
        progress.curve.append(
            {
                "step": progress.total_steps,
                "stage": stage.name,
                "tokens": progress.total_tokens,
                "seconds": round(progress.seconds, 1),
                "loss": round(loss, 4),
                "first_token_accuracy": round(progress.accuracy / weight, 4),
                "exact_accuracy": round(progress.exact / weight, 4),
            }
        )


def _running_mean(mean: float, value: float) -> float:
    return ACCURACY_DECAY * mean + (1 - ACCURACY_DECAY) * value


def draw_curve(curve: list[dict[str, float | int | str]], path: Path) -> None:
    """Draw loss and accuracies over the tokens seen, with the stages' borders."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = [float(point["tokens"]) / 1e6 for point in curve]
    figure, axes = pyplot.subplots(figsize=(10, 5))
    axes.plot(tokens, [float(point["first_token_accuracy"]) for point in curve], label="first answer token")
    axes.plot(tokens, [float(point["exact_accuracy"]) for point in curve], label="whole answer")
    for before, after in pairwise(curve):
        if before["stage"] != after["stage"]:
            axes.axvline(float(after["tokens"]) / 1e6, color="lightgray", linewidth=0.8, zorder=0)
    axes.set(
        xlabel="tokens seen (millions)", ylabel="running accuracy on fresh training text", ylim=(0, 1.02)
    )
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for the checkpoint, the curve and model/, the exported model",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments.seed, STAGES, arguments.out)
    if arguments.resume:
        trainer.restore()
    trainer.save()
    trainer.run()
    draw_curve(trainer.progress.curve, arguments.out / "curve.png")


if __name__ == "__main__":
    main()
