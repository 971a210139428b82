"""The whole measurement: one server loaded once, or two servers loaded in turns."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from commands.loadtest.arrivals import arrival_times
from commands.loadtest.comparison import Comparison
from commands.loadtest.config import BenchConfig, DatasetName, Load
from commands.loadtest.probe import probe
from commands.loadtest.prompts import Form, make_prompts
from commands.loadtest.report import Report, make_report
from commands.loadtest.run import Run, run_load
from commands.loadtest.target import Target
from commands.shared.progress import ProgressLine


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one server or of two, and a description of the load."""

    description: dict[str, object]
    figures: Report | Comparison

    @property
    def has_failures(self) -> bool:
        return self.figures.has_failures

    def as_json(self) -> dict[str, object]:
        return {**self.description, **self.figures.as_json()}


async def measure(config: BenchConfig) -> Result:
    """Load the server, or both servers in turns.

    Raises `TargetError` for a server that cannot be loaded, `OptionError` for a file without usable prompts.
    """
    addresses = [config.base] if config.compare is None else [config.base, config.compare]
    targets = [Target(address, config.load.ignore_eos) for address in addresses]
    forms = await probe(targets, config.load)
    description = _describe(config, targets, forms)
    if config.compare is None:
        return Result(description, await _load_once(targets[0], forms[0], config, 0))
    return Result(description, await _load_in_turns(targets, forms, config))


async def _load_in_turns(targets: Sequence[Target], forms: Sequence[Form], config: BenchConfig) -> Comparison:
    reports: tuple[list[Report], list[Report]] = ([], [])
    for round_index in range(config.rounds):
        # The order alternates: if the machine slows down over time, neither server gains from it.
        for index in (0, 1) if round_index % 2 == 0 else (1, 0):
            reports[index].append(await _load_once(targets[index], forms[index], config, round_index))
    return Comparison(*reports)


async def _load_once(target: Target, form: Form, config: BenchConfig, round_index: int) -> Report:
    load = config.load
    # Each round has new prompts: a server with a prefix cache must not have seen them before.
    seed = load.seed + round_index
    if load.num_warmups:
        await _run(target, form, load, f"warm-up {seed}", load.num_warmups, math.inf)
    run = await _run(target, form, load, str(seed), load.num_prompts, load.request_rate)
    return make_report(run, config.percentiles)


async def _run(target: Target, form: Form, load: Load, seed: str, count: int, rate: float) -> Run:
    prompts = make_prompts(load, form, seed, count)
    arrivals = arrival_times(count, rate, load.burstiness, seed)
    progress = ProgressLine(sys.stderr, target.address.base_url, count)
    try:
        return await run_load(target, prompts, arrivals, load.max_concurrency, load.timeout, progress)
    finally:
        progress.close()


def _prompt_kind(load: Load, form: Form) -> str:
    if load.dataset_path is not None:
        return "file"
    kind = "random tokens" if form is None else "random words"
    return kind if load.dataset_name is DatasetName.RANDOM else f"{load.dataset_name} of {kind}"


def _describe(config: BenchConfig, targets: Sequence[Target], forms: Sequence[Form]) -> dict[str, object]:
    load = config.load
    description: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "base_url": config.base.base_url,
        "endpoint": config.base.endpoint,
        "model_id": targets[0].model,
        "prompts": _prompt_kind(load, forms[0]),
        "num_prompts": load.num_prompts,
        "random_input_len": load.input_len,
        "random_output_len": load.output_len,
        "random_range_ratio": load.range_ratio,
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "ignore_eos": load.ignore_eos,
        "seed": load.seed,
    }
    if load.dataset_name is DatasetName.PREFIX_REPETITION:
        description |= {
            "prefix_repetition_prefix_len": load.repeated_len,
            "prefix_repetition_suffix_len": load.suffix_len,
            "prefix_repetition_num_prefixes": load.num_prefixes,
            "prefix_repetition_output_len": load.repetition_output_len,
        }
    if config.compare is not None:
        description |= {"compare_url": config.compare.base_url, "compare_model_id": targets[1].model}
    return description
