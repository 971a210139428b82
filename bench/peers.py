"""Measure snapserve and other software on the same machine in turns, and write a table of ratios.

Servers are compared with servers through HTTP, and engines with engines in another process. Each peer has its
environment; peers that are not installed are named and left out. `docs/reports/benchmarks.md` describes how
to make the model and to install the peers.

Usage: `python -m bench.peers MODEL_DIR [--loads short one] [--rounds 3] [--json FILE]`.
"""

import argparse
import itertools
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.systems.servers import OWN_OPTIONS, Server, llama_cpp, serving, snapserve, transformers, vllm
from bench.systems.system import (
    HttpServer,
    MeasurementError,
    OpenVinoEngine,
    OwnEngine,
    System,
    measure_in_turns,
)
from commands.loadtest.comparison import medians, ratios
from commands.loadtest.config import Address, Load, PromptFormat
from commands.loadtest.report import Figure

# Seeds are apart, so that no load's prompts are in a cache from another load.
_COMMON = Load(output_len=128, vocab_size=31000, ignore_eos=True)
LOADS = {
    "short": _COMMON.model_copy(
        update={"seed": 1, "num_prompts": 32, "input_len": 128, "max_concurrency": 8, "num_warmups": 8}
    ),
    "one": _COMMON.model_copy(
        update={"seed": 101, "num_prompts": 4, "input_len": 128, "max_concurrency": 1, "num_warmups": 1}
    ),
    "long": _COMMON.model_copy(
        update={"seed": 201, "num_prompts": 8, "input_len": 8192, "max_concurrency": 4, "num_warmups": 1}
    ),
    "single": _COMMON.model_copy(
        update={"seed": 301, "num_prompts": 2, "input_len": 8192, "max_concurrency": 1, "num_warmups": 1}
    ),
}
EVICTION = (128, 1024, 2048)  # entries: sink, recent, total
SCRATCH_CAPACITY = 2112
# Most seconds between tokens of an answer, in rows with longer prefill chunks. OpenVINO GenAI has no bound.
PATIENCE = 0.6
COLUMNS = {
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "TTFT (ms)",
    "median_tpot_ms": "TPOT (ms)",
    "failed": "failed",
    "seconds_to_ready": "ready (s)",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: medians of both systems and the ratios ours / theirs, or an error."""

    load: str
    ours: str
    theirs: str
    our_medians: Mapping[str, Figure]
    their_medians: Mapping[str, Figure]
    ratios: Mapping[str, Figure]
    error: str | None = None

    def as_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


Named = tuple[str, System]


def compare(
    load_name: str, load: Load, ours: Sequence[Named], others: Sequence[Named], rounds: int
) -> Iterator[Row]:
    """Measure all systems once per round, and yield a row for each pair of ours and another."""
    print(
        f"{load_name}: {', '.join(name for name, _ in ours)} against {', '.join(name for name, _ in others)}",
        file=sys.stderr,
    )
    measured = measure_in_turns([system for _, system in (*ours, *others)], load, rounds)
    named = [(name, *figures) for (name, _), figures in zip((*ours, *others), measured, strict=True)]
    for (our_name, own, failure), (name, theirs, error) in itertools.product(
        named[: len(ours)], named[len(ours) :]
    ):
        if error is None and failure is None:
            yield Row(load_name, our_name, name, medians(own), medians(theirs), ratios(own, theirs))
        else:
            yield Row(load_name, our_name, name, {}, {}, {}, str(failure or error))


def http_rows(arguments: argparse.Namespace, logs: Path) -> Iterator[Row]:
    """Compare our server with every installed server, and with our engine."""
    options = shlex.split(arguments.serve_options)
    with serving(snapserve(arguments.model, *options), logs / "snapserve.log") as (url, seconds):
        ours = HttpServer(Address(url), seconds)
        engine = OwnEngine(("--model", str(arguments.model), *OWN_OPTIONS, *options))
        for name, load in _loads(arguments):
            yield from compare(
                name,
                load,
                [("snapserve, HTTP", ours)],
                [("snapserve, engine alone", engine)],
                arguments.rounds,
            )
        for server in installed_servers(arguments):
            yield from _server_rows(arguments, ours, server, logs / f"{server.name.replace(' ', '-')}.log")


def _server_rows(arguments: argparse.Namespace, ours: System, server: Server, log: Path) -> Iterator[Row]:
    try:
        with serving(server, log) as (url, seconds):
            theirs = HttpServer(Address(url, model=server.model, extra_body=server.extra_body), seconds)
            for name, load in _loads(arguments):
                worded = (
                    load
                    if server.takes_token_ids
                    else load.model_copy(update={"prompt_format": PromptFormat.TEXT})
                )
                yield from compare(
                    name,
                    worded,
                    [("snapserve, HTTP", ours)],
                    [(f"{server.name}, HTTP", theirs)],
                    arguments.rounds,
                )
    except MeasurementError as error:
        yield Row("start", "snapserve, HTTP", server.name, {}, {}, {}, str(error))


def engine_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Compare our engine with OpenVINO GenAI's, at its default cache precision and at ours.

    On long prompts OpenVINO's also runs with eviction. Ours then also runs with longer gaps between tokens,
    and with a bounded scratch. If OpenVINO's int8 model exists, both also run with linear layers in int8.
    """
    python = arguments.openvino_python
    if python is None:
        print("OpenVINO GenAI is left out: --openvino-python is not given", file=sys.stderr)
        return
    model = arguments.openvino_model or arguments.model.with_name(f"{arguments.model.name}-openvino")
    options = ("--model", str(arguments.model), *OWN_OPTIONS, *shlex.split(arguments.serve_options))
    exact = ("snapserve, engine", OwnEngine(options))
    patient = (*options, "--max-inter-token-latency", str(PATIENCE))
    patient_name = f"snapserve, engine, up to {PATIENCE} s between tokens"
    in_scratch = (*patient, "--scratch-capacity", str(SCRATCH_CAPACITY))
    long_ones = [
        (patient_name, OwnEngine(patient)),
        (f"{patient_name}, scratch of {SCRATCH_CAPACITY}", OwnEngine(in_scratch)),
    ]
    full = [
        (f"OpenVINO GenAI, engine, KV {precision}", OpenVinoEngine(python, model, precision))
        for precision in ("u8", "bf16")
    ]
    evicting = [
        (
            f"OpenVINO GenAI, engine, KV u8, eviction at {EVICTION[-1]}",
            OpenVinoEngine(python, model, "u8", EVICTION),
        )
    ]
    quantized = model.with_name(f"{model.name}-int8")
    if quantized.exists():
        long_ones.append((f"{long_ones[-1][0]}, w8a8", OwnEngine((*in_scratch, "--quantization", "w8a8"))))
        evicting.append(
            (f"{evicting[0][0]}, weights int8", OpenVinoEngine(python, quantized, "u8", EVICTION))
        )
    for name, load in _loads(arguments):
        ours: list[Named] = [exact]
        others: list[Named] = [*full]
        if name == "long":
            ours += long_ones
            others += evicting
        yield from compare(name, load, ours, others, arguments.rounds)


def installed_servers(arguments: argparse.Namespace) -> Iterator[Server]:
    model: Path = arguments.model
    gguf = model if model.suffix == ".gguf" else arguments.gguf or model.with_name(f"{model.name}.gguf")
    makers: tuple[tuple[str, Callable[[str, Path], Server], Path], ...] = (
        (arguments.vllm, vllm, model),
        (arguments.llama_server, llama_cpp, gguf),
        (arguments.transformers, transformers, model),
    )
    for executable, make, served in makers:
        path = shutil.which(executable)
        if path is None:
            print(f"{executable} is left out: not installed", file=sys.stderr)
        else:
            yield make(path, served)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, each figure as ours / theirs = ratio."""
    lines = [
        "| load | ours | theirs | " + " | ".join(COLUMNS.values()) + " |",
        "|---|---|---|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        cells = [_cell(row, name) for name in COLUMNS]
        if row.error is not None:
            cells[0] = f"no figures: {' '.join(row.error.split())[:200]}"
        lines.append(f"| {row.load} | {row.ours} | {row.theirs} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row, name: str) -> str:
    one, other, ratio = (figures.get(name) for figures in (row.our_medians, row.their_medians, row.ratios))
    both = " / ".join("-" if figure is None else f"{figure:.4g}" for figure in (one, other))
    return both if ratio is None else f"{both} = **{ratio:.2f}**"


def machine() -> dict[str, object]:
    return {
        "machine": platform.machine(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def main() -> int:
    """Return 0, or 1 if a comparison failed."""
    arguments = _parser().parse_args()
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine(),
        "rounds": arguments.rounds,
        "serve_options": arguments.serve_options,
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        logs: Path = arguments.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for row in itertools.chain(http_rows(arguments, logs), engine_rows(arguments)):
            rows.append(row)
            print(table([row]).splitlines()[-1], file=sys.stderr)
            if arguments.json is not None:
                arguments.json.write_text(
                    json.dumps({**document, "rows": [row.as_json() for row in rows]}, indent=2) + "\n"
                )
    print(table(rows))
    return int(any(row.error is not None for row in rows))


def _loads(arguments: argparse.Namespace) -> list[tuple[str, Load]]:
    return [(name, LOADS[name].model_copy(update={"timeout": arguments.timeout})) for name in arguments.loads]


def add_servers(parser: argparse.ArgumentParser) -> None:
    """Add the model, and the commands of the other servers that serve it."""
    parser.add_argument("model", type=Path, help="folder written by bench.make_model, or a GGUF file")
    parser.add_argument("--vllm", default="vllm", help="vLLM's command")
    parser.add_argument("--llama-server", default="llama-server", help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp (default: MODEL_DIR.gguf)")
    parser.add_argument("--transformers", default="transformers", help="the command of transformers")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_servers(parser)
    parser.add_argument("--serve-options", default="", help="of our server, such as '--quantization int4'")
    parser.add_argument("--loads", nargs="+", choices=tuple(LOADS), default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each system (default: 3)")
    parser.add_argument("--timeout", type=float, default=600.0, help="most seconds of a run (default: 600)")
    parser.add_argument("--openvino-python", help="Python with openvino_genai")
    parser.add_argument(
        "--openvino-model", type=Path, help="the model for OpenVINO (default: MODEL_DIR-openvino)"
    )
    parser.add_argument("--logs", type=Path, help="folder for the servers' output")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
