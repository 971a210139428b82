"""Load the engine itself, with no HTTP between: scheduler and backend in this process, fed as `snapserve bench` feeds a server.

The engine's options are those of `snapserve serve`; the load's have the names of `snapserve bench`, and so have the figures. Answers are
greedy and of full length.

Usage: `python -m bench.engine --model DIR --num-prompts 32 --random-input-len 128 --max-concurrency 8 [--json FILE]`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.clock import WallClock
from backends.registry import create_backend
from bench.closed_loop import run_engine
from commands.loadtest import config as bench_config
from commands.loadtest.prompts import make_prompts
from commands.loadtest.report import Report, make_report
from commands.loadtest.table import report_table
from server.options.config import GROUPS, read_config
from server.options.option import OptionError, OptionGroup, add_options, resolve_options

PERCENTILES = (90.0, 99.0)
_NAMES = (
    "num-prompts",
    "random-input-len",
    "random-output-len",
    "random-range-ratio",
    "random-vocab-size",
    "seed",
    "max-concurrency",
    "num-warmups",
    "json",
)
LOAD = OptionGroup(
    "Load",
    tuple(option for group in bench_config.GROUPS for option in group.options if option.name in _NAMES),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, 1 where requests failed, 2 for options that cannot be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_options(parser, (LOAD, *GROUPS))
    parsed = parser.parse_args(arguments)
    try:
        return _measure(parsed, resolve_options((LOAD,), parsed, os.environ))
    except OptionError as error:
        print(f"bench.engine: {error}", file=sys.stderr)
        return 2


def _measure(parsed: argparse.Namespace, values: Mapping[str, Any]) -> int:
    config, clock, load = read_config(parsed, os.environ), WallClock(), _load(values)
    start = time.perf_counter()
    backend = create_backend(config.backend_name, config.backend, clock, fake_vocab_size=load.vocab_size)
    backend.warmup()
    seconds_to_ready = time.perf_counter() - start
    compiled = getattr(backend, "compiled", None)
    if compiled is not None:
        compiled.wait()
    try:
        if load.num_warmups:
            warmups = make_prompts(load, None, f"warm-up {load.seed}", load.num_warmups)
            run_engine(backend, config.scheduler, clock, warmups, load.max_concurrency)
        prompts = make_prompts(load, None, str(load.seed), load.num_prompts)
        report = make_report(
            run_engine(backend, config.scheduler, clock, prompts, load.max_concurrency), PERCENTILES
        )
    finally:
        backend.close()
    _tell(report, {"model_id": config.backend.model, "seconds_to_ready": seconds_to_ready}, values["json"])
    return int(report.has_failures)


def _load(values: Mapping[str, Any]) -> bench_config.Load:
    return bench_config.Load(
        num_prompts=values["num_prompts"],
        input_len=values["random_input_len"],
        output_len=values["random_output_len"],
        range_ratio=values["random_range_ratio"],
        vocab_size=values["random_vocab_size"],
        max_concurrency=values["max_concurrency"],
        num_warmups=values["num_warmups"],
        seed=values["seed"],
    )


def _tell(report: Report, description: Mapping[str, object], path: str | None) -> None:
    print(report_table(report), end="", file=sys.stderr if path == "-" else sys.stdout)
    document = json.dumps({**description, **report.as_json()}, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(document)
    elif path is not None:
        Path(path).write_text(document)


if __name__ == "__main__":
    sys.exit(main())
