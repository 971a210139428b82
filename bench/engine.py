"""Load the engine without HTTP: scheduler and backend run in this process.

The load and the names of options and figures are those of `snapserve bench`. The engine has the options of
`snapserve serve`. Answers are greedy and of full length.

Usage: `python -m bench.engine --model DIR --num-prompts 32 --random-input-len 128 --max-concurrency 8
[--json FILE]`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from backends.conversion import with_local_model
from bench.systems.closed_loop import run_engine
from commands.loadtest.config import Load
from commands.loadtest.prompts import make_prompts
from commands.loadtest.report import Report, make_report
from commands.loadtest.table import report_table
from commands.shared.option_types import JsonFile
from server.options.command_line import OptionError, add_options, read_group
from server.options.serve import add_serve_options, read_config

PERCENTILES = (90.0, 99.0)


class EngineLoad(Load):
    """The load, and the file for the results."""

    json_path: JsonFile | None = None
    """File for the results as JSON; - writes them to the standard output."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, 1 if requests failed, 2 for invalid options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_options(parser, (EngineLoad,))
    add_serve_options(parser)
    parsed = parser.parse_args(arguments)
    try:
        return _measure(parsed, read_group(EngineLoad, parsed, os.environ))
    except OptionError as error:
        print(f"bench.engine: {error}", file=sys.stderr)
        return 2


def _measure(parsed: argparse.Namespace, load: EngineLoad) -> int:
    config = read_config(parsed, os.environ)
    clock = config.backend.make_clock()
    start = time.perf_counter()
    backend = with_local_model(config.backend).load(clock, load.vocab_size)
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
    _report(
        report,
        {"model_id": config.backend.config.model, "seconds_to_ready": seconds_to_ready},
        load.json_path,
    )
    return int(report.has_failures)


def _report(report: Report, description: Mapping[str, object], path: str | None) -> None:
    print(report_table(report), end="", file=sys.stderr if path == "-" else sys.stdout)
    document = json.dumps({**description, **report.as_json()}, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(document)
    elif path is not None:
        Path(path).write_text(document)


if __name__ == "__main__":
    sys.exit(main())
