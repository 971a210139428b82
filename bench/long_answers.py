"""What a packed slot loses along a long answer: divergence from the whole cache, and repetition.

Usage: `python -m bench.long_answers --model DIR --out DIR [--num-tokens 2000] [--slot-capacity 512]`. It
writes `long-answers.json`, `.md` and `.png`.

Each policy samples an answer to each request at temperature 1, beyond any end-of-sequence token. A server
with policy full then reads request and answer. The mean of log p(token, slot) − log p(token, whole cache)
over the drawn tokens estimates KL(slot ‖ whole cache). Policy `sparse` holds every token, most of them in 4
bits, and attends to few. The control, a ring of 64 entries, must diverge more.
A 4-gram of tokens counts as repeated if the answer had it before. The requests are short: `snapstream` then
holds what `streaming-llm` does.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from matplotlib.figure import Figure

from bench.fidelity.comparer import machine
from commands.eval.completer import first_model, http_client
from commands.eval.engine import engine
from commands.eval.errors import EvalError
from commands.eval.prompts import load_tokenizer
from commands.shared.files import save_plot
from commands.shared.progress import ProgressLine
from server.text.tokenizer import RenderError, Tokenizer

REQUESTS = (
    "Write a long story about two sisters who restore an old sailing boat and cross an ocean with it.",
    "Describe the history of a small mountain town from its foundation until today, in many chapters.",
    "Explain in detail how bread is made, from the wheat in the field to the loaf, for a curious child.",
    "Write the diary of a lighthouse keeper over one year, with an entry for every week.",
    "Write a long letter from a retired teacher to a former pupil about the places that she has visited.",
    "Explain how a city supplies its people with water, and discuss each part of the system at length.",
)
NUM_SECTIONS = 4
NGRAM = 4
CONTROL = "ring of 64"


@dataclass(frozen=True, slots=True)
class Answer:
    """`divergence` (nats) and `is_repeated` have an entry for each token."""

    text: str
    divergence: tuple[float, ...]
    is_repeated: tuple[bool, ...]


async def measure(
    model: str, settings: Mapping[str, Sequence[str]], num_tokens: int
) -> dict[str, list[Answer]]:
    """Return each setting's answers. Raises `EvalError`."""
    prompts = _prompts(load_tokenizer(model))
    length = max(map(len, prompts)) + num_tokens
    shared = ("--model", model, "--num-slots", str(len(prompts)), "--max-model-len", str(length))
    texts: dict[str, list[tuple[str, list[int], list[float]]]] = {}
    for name, options in settings.items():
        async with engine((*shared, *options)) as url:
            bodies = [
                {
                    "prompt": prompt,
                    "max_tokens": num_tokens,
                    "temperature": 1,
                    "seed": seed,
                    "ignore_eos": True,
                    "logprobs": 0,
                    "return_token_ids": True,
                }
                for seed, prompt in enumerate(prompts)
            ]
            choices = await _post(url, bodies, name)
        texts[name] = [
            (choice["text"], choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices
        ]
    async with engine((*shared, "--policy", "full")) as url:
        return {name: await _scored(url, prompts, drawn, name) for name, drawn in texts.items()}


async def _scored(
    url: str, prompts: Sequence[list[int]], drawn: Sequence[tuple[str, list[int], list[float]]], name: str
) -> list[Answer]:
    bodies = [
        {"prompt": prompt + token_ids, "max_tokens": 0, "prompt_logprobs": 0}
        for prompt, (_, token_ids, _) in zip(prompts, drawn, strict=True)
    ]
    choices = await _post(url, bodies, f"{name}, whole cache")
    answers = []
    for prompt, (text, token_ids, logprobs), choice in zip(prompts, drawn, choices, strict=True):
        entries = choice["prompt_logprobs"][len(prompt) :]
        full = [entry[str(token)]["logprob"] for token, entry in zip(token_ids, entries, strict=True)]
        divergence = tuple(round(ours - whole, 4) for ours, whole in zip(logprobs, full, strict=True))
        answers.append(Answer(text, divergence, repeated(token_ids)))
    return answers


def repeated(token_ids: Sequence[int]) -> tuple[bool, ...]:
    """Return for each token whether the n-gram that it ends occurred before."""
    seen: set[tuple[int, ...]] = set()
    flags = []
    for end in range(1, len(token_ids) + 1):
        ngram = tuple(token_ids[max(0, end - NGRAM) : end])
        flags.append(ngram in seen)
        seen.add(ngram)
    return tuple(flags)


def _prompts(tokenizer: Tokenizer) -> list[list[int]]:
    try:
        return [
            list(
                tokenizer.render_chat(
                    [{"role": "user", "content": request}],
                    add_generation_prompt=True,
                    continue_final_message=False,
                )
            )
            for request in REQUESTS
        ]
    except RenderError:  # a base model
        return [list(tokenizer.encode(f"{request}\n\n", add_special_tokens=True)) for request in REQUESTS]


async def _post(url: str, bodies: Sequence[Mapping[str, Any]], title: str) -> list[dict[str, Any]]:
    """Return the choice of each request. Raises `EvalError`."""
    progress = ProgressLine(sys.stderr, title, len(bodies))

    async def send(http: httpx.AsyncClient, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
        response = await http.post(f"{url}/v1/completions", json={"model": model, **body})
        if response.status_code != 200:
            raise EvalError(f"{title}: HTTP {response.status_code} {response.text[:500]}")
        progress(True)
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

    try:
        async with http_client(None) as http:
            model = await first_model(http, url)
            return list(await asyncio.gather(*(send(http, model, body) for body in bodies)))
    finally:
        progress.close()


def sections(values: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each section over all answers."""
    return [float(part.mean()) for part in np.array_split(np.array(values), NUM_SECTIONS, axis=1)]


def table(answers: Mapping[str, Sequence[Answer]]) -> str:
    """Return both figures by policy and section as Markdown."""
    parts = [f"section {index + 1}" for index in range(NUM_SECTIONS)]
    lines = ["| figure | policy | " + " | ".join(parts) + " |", "|---" * (NUM_SECTIONS + 2) + "|"]
    for name, of_policy in answers.items():
        means = sections([answer.divergence for answer in of_policy])
        lines.append(f"| KL, nats | {name} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    for name, of_policy in answers.items():
        means = sections([answer.is_repeated for answer in of_policy])
        lines.append(
            f"| repeated 4-grams, % | {name} | " + " | ".join(f"{100 * mean:.1f}" for mean in means) + " |"
        )
    return "\n".join(lines) + "\n"


def plot(answers: Mapping[str, Sequence[Answer]], path: Path) -> None:
    """Draw both figures along the answer, as means over 100 tokens."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, of_policy in answers.items():
        for axes, values in (
            (left, [answer.divergence for answer in of_policy]),
            (right, [answer.is_repeated for answer in of_policy]),
        ):
            means = np.array(values, dtype=float).mean(0)
            blocks = means[: len(means) // 100 * 100].reshape(-1, 100).mean(1)
            axes.plot(100 * np.arange(1, len(blocks) + 1), blocks, label=name)
    left.set(title="KL(slot ‖ whole cache), nats", xlabel="token of the answer")
    right.set(title="share of repeated 4-grams", xlabel="token of the answer", ylim=(0, 1))
    left.legend()
    save_plot(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--num-tokens", type=int, default=2000, help="tokens of an answer")
    parser.add_argument("--slot-capacity", type=int, default=512, help="entries of a slot")
    arguments = parser.parse_args()
    capacity = ("--slot-capacity", str(arguments.slot_capacity))
    settings = {
        "full": ("--policy", "full"),
        "snapstream": ("--policy", "snapstream", *capacity),
        "sparse": ("--policy", "sparse"),
        CONTROL: ("--policy", "streaming-llm", "--num-sink", "4", "--num-recent", "64"),
    }
    try:
        answers = asyncio.run(measure(arguments.model, settings, arguments.num_tokens))
    except EvalError as error:
        print(f"bench.long_answers: {error}", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    document = {
        "model": Path(arguments.model).name,
        "num_tokens": arguments.num_tokens,
        "slot_capacity": arguments.slot_capacity,
        "machine": machine(),
        "answers": {name: [asdict(answer) for answer in each] for name, each in answers.items()},
    }
    (arguments.out / "long-answers.json").write_text(json.dumps(document) + "\n")
    (arguments.out / "long-answers.md").write_text(table(answers))
    plot(answers, arguments.out / "long-answers.png")
    print(table(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
