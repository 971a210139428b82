"""Measure how long our server takes to be ready and compiled, and the cost of compiling for its requests.

Each round starts three servers and loads each as soon as it is ready: one that does not compile, one with an
empty compile cache, and one with the cache of the second. Every other round measures the first one last. The
load of the second must end before its code is ready; otherwise there are no figures.

Usage: `python -m bench.start MODEL_DIR [--rounds 3] [--json FILE]`.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.torch_backend.compiled.code import COMPILED_MESSAGE
from bench.peers import machine
from bench.systems.servers import serving, snapserve
from bench.systems.system import HttpServer, MeasurementError
from commands.loadtest.comparison import medians, ratios
from commands.loadtest.config import Address, Load
from commands.loadtest.report import Figure

LOAD = Load(
    num_prompts=16,
    input_len=128,
    output_len=64,
    vocab_size=31000,
    max_concurrency=8,
    num_warmups=0,
    ignore_eos=True,
    seed=1,
)
TOUCH = LOAD.model_copy(
    update={"num_prompts": 1, "output_len": 2}
)  # the engine switches to compiled code between steps
TIME_LIMIT = 300.0  # seconds until the code is ready
COLUMNS = {
    "seconds_to_ready": "ready (s)",
    "seconds_to_compiled": "compiled (s)",
    "trace": "traced",
    "compile": "compiled",
    "load": "loaded",
    "output_throughput": "output tokens/s",
    "median_tpot_ms": "TPOT (ms)",
    "p99_itl_ms": "p99 ITL (ms)",
}
UNCOMPILED = "--no-compile"
COMPILING = "nothing on disk"
ON_DISK = "code on disk"

_TIMES = re.compile(re.sub(r"%\.\df", r"([\\d.]+)", COMPILED_MESSAGE))


@dataclass(frozen=True, slots=True)
class FreshServer:
    """A server that is started for each measurement. `cache` is its compile cache; None does not compile."""

    model: Path
    cache: Path | None = None

    def measure(self, load: Load) -> Mapping[str, Figure]:
        """Start the server, load it, and wait for its code.

        Raises `MeasurementError`, also if a server with an empty cache has its code before the load ends.
        """
        code = ("--no-compile",) if self.cache is None else ("--compile-cache", str(self.cache))
        has_code = self.cache is not None and any(self.cache.iterdir())
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            start = time.monotonic()
            with serving(snapserve(self.model, "--log-level", "info", *code), log) as (url, seconds):
                loaded = HttpServer(Address(url), seconds)
                figures = dict(loaded.measure(load))
                if self.cache is None:
                    return figures
                if not has_code and _TIMES.search(log.read_text()):
                    limit = f"expected --num-prompts below {load.num_prompts}"
                    raise MeasurementError(f"the code was ready before the load ended: {limit}")
                times = wait_for_code(loaded, log, start + TIME_LIMIT)
                return {
                    **figures,
                    **times,
                    "seconds_to_compiled": seconds if has_code else time.monotonic() - start,
                }


def wait_for_code(loaded: HttpServer, log: Path, end: float) -> dict[str, float]:
    """Wait until the log has the seconds of tracing, compiling and loading, and return them."""
    while time.monotonic() < end:
        match = _TIMES.search(log.read_text())
        if match is not None:
            return dict(zip(("trace", "compile", "load"), map(float, match.groups()), strict=True))
        time.sleep(0.5)
        loaded.measure(TOUCH)
    raise MeasurementError(f"nothing was compiled within {TIME_LIMIT:.0f} s: {log.read_text()[-500:]}")


def measure(model: Path, load: Load, rounds: int) -> dict[str, list[Mapping[str, Figure]]]:
    """Return each server's figures by round. Raises `MeasurementError`."""
    figures: dict[str, list[Mapping[str, Figure]]] = {UNCOMPILED: [], COMPILING: [], ON_DISK: []}
    for index in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            servers = [
                (UNCOMPILED, FreshServer(model)),
                *((name, FreshServer(model, Path(cache))) for name in (COMPILING, ON_DISK)),
            ]
            for name, server in servers if index % 2 == 0 else servers[1:] + servers[:1]:
                measured = server.measure(load.model_copy(update={"seed": load.seed + index}))
                figures[name].append(measured)
                ready = f"ready after {measured['seconds_to_ready']:.1f} s"
                print(f"round {index + 1} of {rounds}: {name}, {ready}", file=sys.stderr)
    return figures


def table(figures: Mapping[str, Sequence[Mapping[str, Figure]]]) -> str:
    """Return medians as a Markdown table, and the ratios of figures while compiling to those without."""
    lines = ["| server | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---|" * len(COLUMNS)]
    for name, rounds in figures.items():
        values = medians(rounds)
        cells = ["" if (value := values.get(column)) is None else f"{value:.4g}" for column in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    slower = ratios(figures[COMPILING], figures[UNCOMPILED])
    changes = ", ".join(
        f"{title} **{slower[column]:.2f}**"
        for column, title in COLUMNS.items()
        if slower.get(column) is not None
    )
    return "\n".join([*lines, "", f"while compiling / without: {changes}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a measurement failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=LOAD.num_prompts,
        help="requests of a load, which must end before the code is ready",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parsed = parser.parse_args(arguments)
    try:
        figures = measure(
            parsed.model, LOAD.model_copy(update={"num_prompts": parsed.num_prompts}), parsed.rounds
        )
    except MeasurementError as error:
        print(f"bench.start: {error}", file=sys.stderr)
        return 1
    print(table(figures))
    if parsed.json is not None:
        parsed.json.write_text(json.dumps({**machine(), "rounds": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
