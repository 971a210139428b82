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
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.demo_model import corpus, words
from examples.demo_model.corpus import FULL, Difficulty
from examples.demo_model.tokenizer import ASSISTANT, BOS, EOS, MAX_LENGTH, PAD, SPECIAL_TOKENS, SYSTEM, USER, build_tokenizer

LEARNING_RATE = 1e-3
WARMUP_STEPS = 100
SMALL_TALK_EVERY = 8
SMALL_TALK_BATCH = 32
ACCURACY_DECAY = 0.95
CHECKPOINT_SECONDS = 60.0
READ_ANSWER = "I have read the text."
IGNORED = -100
HEAD_DIM = 64
TEXT_PLACES, TEXT_WEIGHT = 64, 0.05
LOCAL_FREQUENCY, LOCAL_GAIN = 1e-3, 1.7
FAR_FREQUENCY, FAR_GAIN = 1e-2, 5.0
EMBEDDING_SCALE, COPY_GAIN, OUTPUT_GAIN = 0.08, 1.5, 0.5


# A piece of text and whether the model learns to write it; special tokens are pieces of their own.
Piece = tuple[str, bool]


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: what the text is like, and when it counts as learned."""

    name: str
    difficulty: Difficulty
    num_facts: int
    num_fillers: int
    num_questions: int
    batch_size: int
    max_steps: int
    target: float = 0.97  # the running accuracy of first answer tokens at which the stage ends
    is_varied: bool = True  # with system prompts, small talk, documents read a turn before they are asked about, and text to predict
    max_shrink: int = 1  # batches are of shorter documents, up to this many times, and of as many more of them
    max_position: int = 0  # positions skip ahead at random up to about this one, so that far distances are met in short texts
    rate: float = LEARNING_RATE
    final_rate: float = LEARNING_RATE  # the learning rate goes from `rate` to this over `max_steps`

    def shrunk(self, times: int) -> "Stage":
        """The same amount of text in shorter documents."""
        facts = max(4, self.num_facts // times)
        return replace(self, num_facts=facts, num_fillers=self.num_fillers // times, batch_size=self.batch_size * times)


def _words(share: int, templates: int) -> Difficulty:
    return Difficulty(share, min(share, len(words.ADJECTIVES)), share, templates, templates, one_topic_share=1.0)


def _templates(number: int) -> Difficulty:
    return Difficulty(num_statements=number, num_questions=number)


STAGES: tuple[Stage, ...] = (
    Stage("64 words, 4 facts", _words(64, 1), 4, 0, 8, 16, 2000, is_varied=False),
    Stage("64 words, 8 facts", _words(64, 2), 8, 2, 16, 8, 2000, is_varied=False),
    Stage("128 words, 8 facts", _words(128, 2), 8, 4, 16, 8, 2000),
    Stage("all words, 8 facts", _templates(2), 8, 4, 16, 8, 2000),
    Stage("all words, 16 facts", _templates(4), 16, 16, 32, 4, 2000, max_position=1024),
    Stage("all templates, 32 facts, 900 tokens", FULL, 32, 64, 32, 3, 600, 0.96, max_shrink=4, max_position=2048),
    Stage("64 facts, 2,300 tokens", FULL, 64, 180, 32, 1, 300, 0.98, max_shrink=8, max_position=6000, rate=8e-4, final_rate=6e-4),
    Stage("110 facts, 4,000 tokens", FULL, 110, 320, 48, 1, 150, 0.995, max_shrink=16, max_position=9000, rate=6e-4, final_rate=4.2e-4),
    Stage("128 facts, 8,000 tokens", FULL, 128, 760, 48, 1, 70, 1.0, max_shrink=8, max_position=12000, rate=4.2e-4, final_rate=0.0),
)


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
        conversations = [_system_turn(rng) + _exchanges(rng.choices(corpus.SMALL_TALK, k=2)) for _ in range(SMALL_TALK_BATCH)]
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
        encodings = self._tokenizer.backend_tokenizer.encode_batch([text for text, _ in pieces], add_special_tokens=False)
        for (text, is_learned), encoding in zip(pieces, encodings, strict=True):
            start = len(ids)
            ids += encoding.ids
            if is_learned:
                learned += range(start, len(ids))
                firsts += [] if text == EOS else [start]
        return ids, learned, firsts


def _document_turns(rng: random.Random, stage: Stage) -> list[Piece]:
    text = corpus.write_training_text(rng, stage.num_facts, stage.num_fillers, stage.num_questions, stage.difficulty)
    exchanges = list(text.exchanges)
    if stage.is_varied and rng.random() < 0.25:
        exchanges.insert(0, (text.document, READ_ANSWER))
    else:
        exchanges[0] = (f"{text.document}\n\n{exchanges[0][0]}", exchanges[0][1])
    if stage.is_varied and rng.random() < 0.25:
        exchanges.insert(rng.randint(0, len(exchanges)), rng.choice(corpus.SMALL_TALK))
    return (_system_turn(rng) if stage.is_varied else []) + _exchanges(exchanges)


def _system_turn(rng: random.Random) -> list[Piece]:
    return [(SYSTEM, False), (rng.choice(corpus.SYSTEM_PROMPTS), False), (EOS, False)] if rng.random() < 0.2 else []


def _exchanges(exchanges: list[tuple[str, str]]) -> list[Piece]:
    pieces = []
    for said, answer in exchanges:
        pieces += [(USER, False), (said, False), (EOS, False), (ASSISTANT, False), (answer, True), (EOS, True)]
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


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make the untrained model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    shape_start(model, tokenizer)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    return model


def shape_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Start the weights near the circuit they have to become, which saves the long plateau on which a random start only guesses.

    Half of the residual stream begins as the tokens' own, half as what the first layer writes. First layer: head h looks h + 1 tokens back
    and writes what is there into the second half; for that, every embedding gets the same large first component, from which the queries
    and keys are made whose rotated products peak at that distance. Second layer: attends to positions whose second half is alike (queries
    and keys begin as one projection, with most weight on the slow rotary pairs, which match at any distance), and copies their first half.
    Output: what is copied is written, and an answer's first word, which has no leading space, begins as its twin with one. Training is
    free to change all of it.
    """
    config = model.config
    half = config.hidden_size // 2
    frequencies = model.model.rotary_emb.inv_freq  # [pair]
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, :half].normal_(std=EMBEDDING_SCALE)
        embedding[:, 0] = 3 * EMBEDDING_SCALE
        embedding[:, half:] = 0
        first = model.model.layers[0].self_attn
        fast = frequencies > LOCAL_FREQUENCY
        for head in range(config.num_attention_heads):
            rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            angle = -(head + 1) * frequencies
            first.q_proj.weight[rows, 0] = LOCAL_GAIN * torch.cat([angle.cos() * fast, angle.sin() * fast])
            first.k_proj.weight[rows, 0] = LOCAL_GAIN * torch.cat([fast, torch.zeros_like(frequencies)])
        first.o_proj.weight[:half] = 0
        second = model.model.layers[1].self_attn
        scale = torch.where(frequencies < FAR_FREQUENCY, FAR_GAIN, 1.0).repeat(2 * config.num_attention_heads)
        second.q_proj.weight *= scale[:, None]
        second.q_proj.weight[:, :half] = 0
        second.k_proj.weight.copy_(second.q_proj.weight)
        second.v_proj.weight[:, half:] = 0
        second.v_proj.weight[:, 0] = 0  # common to all tokens
        second.v_proj.weight *= COPY_GAIN
        second.o_proj.weight.copy_(second.v_proj.weight.T)
        output = model.lm_head.weight
        output.copy_(OUTPUT_GAIN * embedding)
        output[:, 0] = 0
        for word in words.ADJECTIVES:
            alone, spaced = (tokenizer.encode(text, add_special_tokens=False)[0] for text in (word, f" {word}"))
            output[alone] = output[spaced]


def hidden_states(model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Run the layers under plain causal attention.  # [sequence, position, hidden]

    Not the model's own `forward`, which takes a skip in the positions for the border of a packed sequence and attends to nothing before it.
    """
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, position_ids=positions)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions)
    normed: torch.Tensor = model.model.norm(hidden)
    return normed


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer as `from_pretrained` reads them."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Trainer:
    """The model, its optimizer and where training stands, kept together so that they are saved and restored together."""

    def __init__(self, seed: int, stages: tuple[Stage, ...], out: Path) -> None:
        torch.manual_seed(seed)
        self.seed, self.stages, self.out = seed, stages, out
        self.tokenizer = build_tokenizer()
        self.writer = Writer(self.tokenizer)
        self.model = build_model(self.tokenizer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
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
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "progress": asdict(self.progress)}, partial)
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
        with tqdm(total=stage.max_steps, initial=progress.step, desc=stage.name, unit="step", mininterval=2.0) as bar:
            while progress.step < stage.max_steps:
                start = time.monotonic()
                loss = self._step(stage)
                progress.seconds += time.monotonic() - start
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", first=f"{progress.accuracy:.3f}", exact=f"{progress.exact:.3f}", refresh=False)
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
        batch = self.writer.small_talk_batch(rng) if talks else self.writer.batch(rng, stage.shrunk(shrink) if shrink > 1 else stage)
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
            whole = torch.ones(int(first.sum()), dtype=torch.bool).scatter_reduce(0, first.cumsum(0) - 1, right, "prod")
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
        return torch.nn.functional.cross_entropy(logits, ids[:, places + 1].flatten(), ignore_index=self.writer.pad)

    def _note(self, stage: Stage, loss: float) -> None:
        """Add a point to the curve, the running means corrected for their start at 0."""
        progress = self.progress
        if progress.num_measured == 0:
            return
        weight = 1.0 - ACCURACY_DECAY**progress.num_measured
        progress.curve.append({
            "step": progress.total_steps, "stage": stage.name, "tokens": progress.total_tokens, "seconds": round(progress.seconds, 1),
            "loss": round(loss, 4), "first_token_accuracy": round(progress.accuracy / weight, 4),
            "exact_accuracy": round(progress.exact / weight, 4),
        })


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
    axes.set(xlabel="tokens seen (millions)", ylabel="running accuracy on fresh training text", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint, the curve and model/, the exported model")
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
