"""What cache policies and NVIDIA's kvpress lose on a real model, with the question in several places.

Usage: `python -m bench.real_models --model smollm2 --out DIR [--kvpress-python .venv-kvpress/bin/python]
[--layouts NAME …] [--settings NAME …]` and the options of `snapserve eval prose` for cases. Each layout has a
folder in --out with `comparison.json`, as `bench.comparison` writes it. A call continues an interrupted one.
`summary.md` has a row for each setting, a column for each layout of the call, and each layout's table.

KVzip cannot skip layers with a sliding window. It is left out of the default for models that have any.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.conversion import local_model
from backends.errors import ModelLoadError
from bench.fidelity.comparer import FULL, SETTINGS, Comparer, settings_of, table
from bench.fidelity.presses import Kvpress
from bench.systems.system import MeasurementError
from cache.policy import PolicyName
from commands.eval.errors import EvalError
from commands.eval.options import Pack, ProseSuiteOptions
from commands.eval.prose.layout import QuestionPosition, Turns
from commands.eval.prose.measure import ProseConfig, prose_config
from commands.eval.result import SuiteResult
from commands.eval.statistics import mean_interval
from server.options.command_line import OptionError, add_options, groups_of, read_options

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "last": {},
    "20-after": {"trailing_tokens": 20},
    "200-after": {"trailing_tokens": 200},
    "first": {"question_position": QuestionPosition.FIRST},
    "middle": {"question_position": QuestionPosition.MIDDLE},
    "unknown": {"pack": Pack.BEFORE_QUESTION},
    "turns": {"turns": Turns.SEVERAL},
}
"""Where the question is. The instructions of `20-after` follow it; `unknown` packs the slot before it."""

# Policies and presses with a published method, the whole caches, and random tokens: a control that must lose.
DEFAULT_SETTINGS = (
    FULL,
    "snapstream",
    "snapstream (guessed sizes)",
    "streaming-llm",
    "kvpress SnapKV",
    "kvpress ChunkKV",
    "kvpress AdaKV",
    "kvpress KVzip",
    "kvpress TOVA",
    "kvpress Random",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The arguments of a call."""

    out: Path
    kvpress: Kvpress | None
    settings: Sequence[str]
    layouts: Sequence[str]
    options: ProseSuiteOptions

    def config(self, layout: str) -> ProseConfig:
        """Return the configuration of one layout's cases. Raises `OptionError`."""
        served = self.options.served.model_copy(update={"policy": (PolicyName.FULL,), "base_url": None})
        return prose_config(served, self.options.cases.model_copy(update=LAYOUTS[layout]))

    def measure(self) -> dict[str, SuiteResult]:
        """Return each layout's result. Raises `MeasurementError`, `EvalError`, `OptionError`."""
        settings = settings_of(self.settings, self.options.served.compression or (4.0,))
        results = {}
        for layout in self.layouts:
            print(f"layout {layout}", file=sys.stderr)
            folder = self.out / layout
            folder.mkdir(parents=True, exist_ok=True)
            comparer = Comparer(self.config(layout), self.kvpress, folder)
            comparer.measure(settings)
            results[layout] = comparer.all_runs()
            (self.out / "summary.md").write_text(summary(results))
        return results


def summary(results: Mapping[str, SuiteResult]) -> str:
    """Return the mean scores as Markdown, with 95 % intervals, and each layout's table of tasks."""
    rows = ["| mean over tasks, % | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for label in dict.fromkeys(run.setting.label for result in results.values() for run in result.runs):
        cells = [_mean(result, label) for result in results.values()]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    tables = [f"## {layout}\n\n{result.title}\n\n{table(result)}" for layout, result in results.items()]
    return "\n\n".join(["\n".join(rows), *tables])


def default_settings(model: Path) -> list[str]:
    """Return the settings that a model folder can be measured with."""
    config = json.loads((model / "config.json").read_text())
    windows = config.get("layer_types", ["sliding_attention"] * (config.get("sliding_window") is not None))
    has_windows = "sliding_attention" in windows
    return [name for name in DEFAULT_SETTINGS if not (has_windows and name == "kvpress KVzip")]


def _mean(result: SuiteResult, label: str) -> str:
    run = next((run for run in result.runs if run.setting.label == label), None)
    if run is None:
        return "–"
    low, high = mean_interval([task.scores for task in run.tasks.values()])
    return f"{run.mean:.0f} ({low:.0f} to {high:.0f})"


def _comparison() -> Comparison:
    parser = argparse.ArgumentParser(prog="python -m bench.real_models", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--kvpress-python", help="Python with kvpress, as scripts/setup-kvpress installs it")
    for name, known, default in (
        ("--settings", SETTINGS, None),
        ("--layouts", LAYOUTS, tuple(LAYOUTS)),
    ):
        parser.add_argument(
            name, nargs="+", choices=known, default=default, metavar="NAME", help=", ".join(known)
        )
    add_options(parser, groups_of(ProseSuiteOptions))
    arguments = parser.parse_args()
    options = read_options(ProseSuiteOptions, arguments, {})
    model = local_model(options.served.model)  # kvpress cannot read a GGUF file
    served = options.served.model_copy(update={"model": model})
    settings = arguments.settings or default_settings(Path(model))
    kvpress = None if arguments.kvpress_python is None else Kvpress(arguments.kvpress_python, model)
    return Comparison(
        arguments.out,
        kvpress,
        settings,
        arguments.layouts,
        ProseSuiteOptions(served, options.cases, options.report),
    )


def main() -> int:
    try:
        results = _comparison().measure()
    except (EvalError, ModelLoadError, OptionError, MeasurementError) as error:
        print(f"bench.real_models: {error}", file=sys.stderr)
        return 1
    print(summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
