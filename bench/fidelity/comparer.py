"""Runs of every policy, of the guessed recipe and of kvpress on the same cases, and their table."""

import asyncio
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.fidelity.presses import Kvpress, NamedSetting
from bench.systems.system import ROOT
from cache.policy import PolicyName
from commands.eval.completer import SlotUsage
from commands.eval.prompts import Prompt, load_tokenizer
from commands.eval.prose.measure import ProseConfig, write_prose_prompts
from commands.eval.result import SuiteResult
from commands.eval.ruler import RulerConfig, measure_prompts, write_prompts
from commands.eval.run import Run, TaskScores
from commands.eval.setting import Setting, model_id, split_options
from commands.eval.statistics import bootstrap_interval, mean_interval, mean_of_means
from server.options.command_line import OptionError

FULL = "full"
CASES_PER_WRITE = 25  # of each task


@dataclass(frozen=True, slots=True)
class Ours:
    """A policy of ours, with options of `snapserve serve`."""

    policy: PolicyName
    serve_options: str = ""


@dataclass(frozen=True, slots=True)
class Theirs:
    """One of kvpress's presses, or None for the full cache of transformers."""

    press: str | None


SETTINGS: Mapping[str, Ours | Theirs] = {
    FULL: Ours(PolicyName.FULL),
    "snapstream": Ours(PolicyName.SNAPSTREAM),
    "snapstream (guessed sizes)": Ours(PolicyName.SNAPSTREAM, "--selection snapstream"),
    "snapkv": Ours(PolicyName.SNAPKV),
    "snapkv (window 64)": Ours(PolicyName.SNAPKV, "--selection-options observation-window=64"),
    "streaming-llm": Ours(PolicyName.STREAMING_LLM),
    "kvpress none": Theirs(None),
    "kvpress SnapKV": Theirs("SnapKV"),
    "kvpress StreamingLLM": Theirs("StreamingLLM"),
    "kvpress ChunkKV": Theirs("ChunkKV"),
    "kvpress AdaKV": Theirs("AdaKV"),
    "kvpress KVzip": Theirs("KVzip"),
    "kvpress TOVA": Theirs("TOVA"),
    "kvpress Random": Theirs("Random"),
}


class Comparer:
    """Measures one setting after another over the same prompts, and writes each result."""

    def __init__(
        self,
        config: RulerConfig | ProseConfig,
        kvpress: Kvpress | None,
        out: Path,
        earlier: Sequence[Path] = (),
    ) -> None:
        self._config = config
        self._kvpress = kvpress
        self._path = out / "comparison.json"
        self._prompts = (
            write_prompts(config) if isinstance(config, RulerConfig) else write_prose_prompts(config)
        )
        self._num_cases: int = config.facts["num_cases"]
        self._weights = weights_digest(Path(config.target.model))
        self._runs: dict[str, Run] = {}
        own_results = [self._path] if self._path.exists() else []
        for path in (*earlier, *own_results):
            facts = config.facts.keys() - {"num_cases"}
            for run in _read_runs(path, self._document(), facts, self._prompts.keys()):
                if run.num_cases > self._num_done(run.setting.label):
                    self._runs[run.setting.label] = run

    def measure(self, settings: Sequence[NamedSetting]) -> SuiteResult:
        """Measure the missing cases. Raises `MeasurementError`, `EvalError`, `OptionError`."""
        for setting in settings:
            while (num_done := self._num_done(setting.label)) < self._num_cases:
                start = time.monotonic()
                batch = {
                    name: prompts[num_done : num_done + CASES_PER_WRITE]
                    for name, prompts in self._prompts.items()
                }
                run = self._measured(setting, batch)
                if num_done:
                    run = _joined(self._runs[setting.label], run)
                self._runs[setting.label] = run
                state = f"{run.mean:.1f} after {run.num_cases} of {self._num_cases} cases per task"
                print(f"{setting.label}: {state} ({time.monotonic() - start:.0f} s)", file=sys.stderr)
                self._write()
        self._write()  # also writes the runs of other calls where no case was missing
        return self._result([self._runs[setting.label] for setting in settings])

    def all_runs(self) -> SuiteResult:
        """Return every run of the cases so far, those of earlier calls included, in the order of SETTINGS."""
        order = {name: index for index, name in enumerate(SETTINGS)}
        runs = sorted(self._runs.values(), key=lambda run: order.get(str(run.setting.policy), len(order)))
        return self._result(runs)

    def _num_done(self, label: str) -> int:
        run = self._runs.get(label)
        return 0 if run is None else run.num_cases

    def _measured(self, setting: NamedSetting, prompts: Mapping[str, Sequence[Prompt]]) -> Run:
        config = self._config
        entry = SETTINGS[setting.policy]
        if isinstance(entry, Theirs):
            if self._kvpress is None:
                raise OptionError(f"--settings has {setting.policy!r}, which needs --kvpress-python")
            return self._kvpress.run(
                setting, entry.press, prompts, load_tokenizer(config.target.model), config.target.length
            )
        target = replace(
            config.target, serve_options=(*config.target.serve_options, *split_options(entry.serve_options))
        )
        ours = replace(config, target=target, settings=[Setting(entry.policy, setting.compression)])
        all_prompts = [prompt for of_task in self._prompts.values() for prompt in of_task]
        return replace(asyncio.run(measure_prompts(ours, prompts, all_prompts)).runs[0], setting=setting)

    def _result(self, runs: Sequence[Run]) -> SuiteResult:
        config = self._config
        return SuiteResult(
            config.suite, model_id(config.target.model), None, config.title, config.facts, runs
        )

    def _write(self) -> None:
        partial = self._path.with_suffix(".new")
        partial.write_text(json.dumps(self._document()) + "\n")
        partial.replace(self._path)

    def _document(self) -> dict[str, Any]:
        result = self._result(list(self._runs.values()))
        facts = {"weights": self._weights, "selection_code": selection_digest(), "machine": machine()}
        return {**result.as_json(), **facts}


def settings_of(names: Sequence[str], compressions: Sequence[float]) -> list[NamedSetting]:
    """Return the settings with a full cache, then every other setting at each compression."""
    full = [name for name in names if SETTINGS[name] in (Ours(PolicyName.FULL), Theirs(None))]
    others = [NamedSetting(name, ratio) for ratio in compressions for name in names if name not in full]
    return [*(NamedSetting(name, None) for name in full), *others]


def _joined(earlier: Run, more: Run) -> Run:
    """Return the run over the cases of both. Raises `OptionError` where options other than sizes differ."""
    old = " ".join(map(str, _chosen_options(earlier)))
    new = " ".join(map(str, _chosen_options(more)))
    if old != new:
        raise OptionError(
            f"--out has results of {earlier.setting.label} with '{old}', not '{new}': choose another folder"
        )
    return earlier.joined(more)


def _chosen_options(run: Run) -> tuple[str, ...]:
    """Return a run's options without the sizes at their end, which depend on its cases."""
    return run.options[: run.options.index("--num-slots")] if "--num-slots" in run.options else run.options


def _read_runs(path: Path, expected: Mapping[str, Any], facts: Set[str], tasks: Set[str]) -> list[Run]:
    """Return the runs of an earlier call over the first of the same cases: those with the same `facts`.

    Raises `OptionError` for a file without runs, and for runs of other cases or another model.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} cannot be read: {error}") from error
    for name in ("model", "weights", "version", *facts):
        if document.get(name) != expected[name]:
            raise OptionError(
                f"{path} has runs of another {name}: expected {expected[name]}, got {document.get(name)}"
            )
    runs = [_read_run(run) for run in document["runs"]]
    if document.get("selection_code") != expected["selection_code"]:
        stale = [run for run in runs if _selects(run)]
        runs = [run for run in runs if not _selects(run)]
        labels = ", ".join(run.setting.label for run in stale)
        if stale:
            print(f"{path}: {labels} came from other code that selects tokens, so not used", file=sys.stderr)
    for run in runs:
        if run.tasks.keys() != tasks:
            raise OptionError(
                f"{path} has runs of other tasks: expected {', '.join(sorted(tasks))}, "
                f"got {', '.join(run.tasks)}"
            )
        if run.num_cases > expected["num_cases"]:
            raise OptionError(
                f"{path} has {run.num_cases} cases of {run.setting.label}: "
                f"expected at most {expected['num_cases']}, as requested"
            )
    return runs


def _selects(run: Run) -> bool:
    """Return whether a run's answers depend on this project's selection of tokens."""
    entry = SETTINGS.get(str(run.setting.policy))
    return isinstance(entry, Ours) and entry.policy in (PolicyName.SNAPSTREAM, PolicyName.SNAPKV)


def _read_run(run: Mapping[str, Any]) -> Run:
    tasks = {
        name: TaskScores(
            tuple(task["scores"]),
            task["num_tokens"],
            task["num_packed"],
            task["example"],
            _read_held(task.get("cache")),
        )
        for name, task in run["tasks"].items()
    }
    return Run(NamedSetting(run["policy"], run["compression"]), tuple(run["serve_options"]), tasks)


def _read_held(cache: Mapping[str, Any] | None) -> SlotUsage | None:
    return (
        None
        if cache is None
        else SlotUsage(tuple(cache["pools"]), cache["kept_tokens"], cache["evicted_tokens"])
    )


def selection_digest() -> str:
    """Return a digest of the code that selects which tokens of a prompt are kept."""
    files = [*sorted((ROOT / "cache").glob("*.py")), ROOT / "server" / "text" / "question.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def weights_digest(model: Path) -> str:
    """Return a digest that identifies the weights."""
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "num_cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def table(result: SuiteResult) -> str:
    """Return a Markdown table for each compression, with a row for each task and a column for each policy.

    The last row has the differences of the means from the first column, the full cache.
    """
    full = [run for run in result.runs if run.setting.compression is None]
    ratios = sorted({run.setting.compression for run in result.runs if run.setting.compression is not None})
    parts = [
        _table_of(f"{ratio:g}×", [*full, *(run for run in result.runs if run.setting.compression == ratio)])
        for ratio in ratios
    ]
    return "\n\n".join(parts or [_table_of("", full)]) + "\n"


def _table_of(title: str, runs: Sequence[Run]) -> str:
    header = f"| {title} | " + " | ".join(run.setting.policy or "" for run in runs) + " |"
    rows = [[name, *(f"{run.tasks[name].mean:.1f}" for run in runs)] for name in runs[0].tasks]
    rows.append(["**mean**", *(f"**{run.mean:.1f}**" for run in runs)])
    rows.append(
        [
            "95 % interval",
            *(_interval(mean_interval([task.scores for task in run.tasks.values()])) for run in runs),
        ]
    )
    rows.append(["against the first", "–", *(_difference(runs[0], run) for run in runs[1:])])
    return "\n".join(
        [header, "|" + "---|" * (len(runs) + 1), *("| " + " | ".join(row) + " |" for row in rows)]
    )


def _difference(first: Run, second: Run) -> str:
    changes = [
        [b - a for a, b in zip(task.scores, second.tasks[name].scores, strict=True)]
        for name, task in first.tasks.items()
    ]
    return f"{mean_of_means(changes):+.1f} ({_interval(bootstrap_interval(changes))})"


def _interval(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.1f} to {interval[1]:.1f}"
