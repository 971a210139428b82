"""Measure whether our SnapKV and kvpress's keep the same tokens in each layer and head.

Both have the same prompts, window, pooling and budget.

Usage: `python -m bench.agreement --model DIR --kvpress-python .venv-kvpress/bin/python [--dtype float32]
--json FILE` and the options of `snapserve eval ruler` for cases. `docs/reports/comparison.md` has the
results.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.clock import VirtualClock
from backends.interface import PrefillBatch, PrefillRow
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DtypeName
from bench.fidelity.comparer import machine
from bench.fidelity.presses import Kvpress
from bench.systems.system import MeasurementError
from cache.policy import PolicyName
from commands.eval.errors import EvalError
from commands.eval.options import RulerOptions
from commands.eval.prompts import Prompt
from commands.eval.ruler import ruler_config, write_prompts
from commands.eval.setting import Setting, model_id, serve_config
from server.options.command_line import OptionError, add_options, groups_of, read_options

WINDOW = 64  # the default of kvpress, like the pooling, which is also our default for SnapKV
POOLING_SIZE = 5

Entries = Sequence[Sequence[Sequence[int]]]
"""The kept tokens: [layer][kv_head][entry]."""

Scores = Sequence[Sequence[Sequence[float]]]
"""kvpress's scores of the candidates: [layer][kv_head][candidate]."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many kept tokens both have. A choice is made for each layer and KV head of a prompt."""

    num_choices: int
    num_kept: int
    num_common: int
    num_common_at_equal_borders: int  # with kvpress's scores averaged like ours at the borders
    # With equal borders, the largest distance of a differing token's score from the score of the last token
    # kept, as a share of the latter.
    largest_gap: float

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def agreement(prompts: Sequence[tuple[Entries, Entries, Scores]]) -> Agreement:
    """Compare our entries and kvpress's of each prompt, without the observation window, which both hold."""
    num_choices = 0
    num_kept = 0
    num_common = 0
    num_at_equal_borders = 0
    largest_gap = 0.0
    for choice in prompts:
        for ours, theirs, scores in (
            heads for layer in zip(*choice, strict=True) for heads in zip(*layer, strict=True)
        ):
            averaged = _averaged_within(scores)
            best = sorted(range(len(averaged)), key=lambda index: (-averaged[index], index))[: len(ours)]
            last = averaged[best[-1]]
            num_choices += 1
            num_kept += len(ours)
            num_common += len(set(ours) & set(theirs))
            num_at_equal_borders += len(set(ours) & set(best))
            largest_gap = max(
                [largest_gap, *(abs(averaged[index] - last) / last for index in set(ours) ^ set(best))]
            )
    return Agreement(num_choices, num_kept, num_common, num_at_equal_borders, largest_gap)


def _averaged_within(scores: Sequence[float]) -> list[float]:
    """Turn averages that count zeros beyond the borders into averages of the scores within."""
    half = POOLING_SIZE // 2
    last = len(scores) - 1
    return [
        score * POOLING_SIZE / (min(index, half) + 1 + min(last - index, half))
        for index, score in enumerate(scores)
    ]


def our_entries(model: str, dtype: str, prompts: Sequence[Prompt], num_entries: int) -> Iterator[Entries]:
    """Yield the entries that our backend's slot keeps of each prompt after prefill."""
    longest = max(prompt.num_prefill_tokens for prompt in prompts) + 1
    slots = (
        "--policy",
        PolicyName.SNAPKV,
        "--selection-options",
        f"observation-window={WINDOW}",
        "--num-kept",
        str(num_entries - WINDOW),
    )
    sizes = (
        "--num-recent",
        str(WINDOW + 1),
        "--max-model-len",
        str(longest),
        "--num-slots",
        "1",
        "--num-scratch",
        "1",
    )
    config = serve_config(("--model", model, "--dtype", dtype, *slots, *sizes)).backend.config
    with closing(TorchBackend(config, VirtualClock())) as backend:
        for prompt in prompts:
            _prefill(backend, tuple(prompt.token_ids[: prompt.num_prefill_tokens]))
            yield [layer.slots.kept_index[0].tolist() for layer in backend.pools[0].cache.layers]


def _prefill(backend: TorchBackend, token_ids: tuple[int, ...]) -> None:
    shape = max(backend.spec.prefill_shapes, key=lambda shape: (shape.num_tokens, -shape.num_rows))
    for start in range(0, len(token_ids), shape.num_tokens):
        chunk = token_ids[start : start + shape.num_tokens]
        row = PrefillRow("agreement", chunk, start, len(token_ids), slots=(0,), scratch=0)
        backend.submit(PrefillBatch((row,), shape)).result()


def measure(
    kvpress: Kvpress, prompts: Mapping[str, Sequence[Prompt]], num_entries: int
) -> dict[str, Agreement]:
    """Return the agreement of each task. Raises `MeasurementError`."""
    every = [prompt for of_task in prompts.values() for prompt in of_task]
    lines = kvpress.answers("SnapKV", every, num_entries, title="kvpress", reports_entries=True)
    next(lines)
    theirs = iter([(line["entries"], line["scores"]) for line in lines])
    ours = our_entries(kvpress.model, kvpress.dtype, every, num_entries)
    return {
        name: agreement([(next(ours), *next(theirs)) for _ in of_task]) for name, of_task in prompts.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.agreement", allow_abbrev=False)
    parser.add_argument(
        "--kvpress-python", required=True, help="Python with kvpress, as scripts/setup-kvpress installs it"
    )
    parser.add_argument("--dtype", choices=DtypeName, default=DtypeName.FLOAT32, type=DtypeName)
    add_options(parser, groups_of(RulerOptions))
    arguments = parser.parse_args()
    try:
        options = read_options(RulerOptions, arguments, {})
        served = options.served.model_copy(update={"base_url": None})
        config = replace(ruler_config(served, options.cases), settings=[Setting(PolicyName.SNAPKV)])
        num_entries = int(config.target.length / options.served.compression[0])
        kvpress = Kvpress(arguments.kvpress_python, config.target.model, arguments.dtype)
        tasks = measure(kvpress, write_prompts(config), num_entries)
    except (EvalError, OptionError, MeasurementError) as error:
        print(f"bench.agreement: {error}", file=sys.stderr)
        return 1
    document: dict[str, Any] = {
        "model": model_id(config.target.model),
        "dtype": arguments.dtype,
        "length": config.target.length,
        "num_entries": num_entries,
        "num_cases": config.num_cases,
        "seed": config.seed,
        "machine": machine(),
        "tasks": {name: of_task.as_json() for name, of_task in tasks.items()},
    }
    written = json.dumps(document, indent=1) + "\n"
    print(written, end="")
    path = options.report.json_path
    if path is not None and path != "-":
        Path(path).write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
