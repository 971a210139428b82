"""Measure what the page's live view costs, with a viewer of `/slots/events` and without.

One server with 8 slots has a load of 8 requests at a time, in turns without and with a viewer, with the same
prompts in both turns of a round. The viewer is a process of its own that reads the events and drops them. The
aim is a median of at most 1.01 of the server's processor time for a token. Tokens per second are reported
too: single rounds of them differ by more than that.

Usage: `python -m bench.live_view MODEL_DIR [--rounds 15] [--no-compile] [--json FILE]`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.peers import machine
from bench.systems.servers import serving, snapserve
from bench.systems.system import HttpServer, MeasurementError, measure_in_turns
from commands.loadtest.config import Address, Load
from commands.loadtest.report import Figure

AIM = 1.01
THROUGHPUT = "output_throughput"
PROCESSOR = "processor_seconds_per_token"
LOAD = Load(
    num_prompts=64,
    input_len=128,
    output_len=128,
    vocab_size=2000,
    max_concurrency=8,
    num_warmups=8,
    ignore_eos=True,
    seed=1,
)
# Prints a line once the view has begun, and the number of its samples at the end.
VIEWER = """
import sys, urllib.request
events = urllib.request.urlopen(sys.argv[1])
events.readline()
print("open", flush=True)
print(sum(line.startswith(b'data: {"type": "sample"') for line in events), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Metered:
    """A server whose processor time is measured too."""

    server: HttpServer

    def measure(self, load: Load) -> Mapping[str, Figure]:
        url = self.server.address.base_url
        before = processor_seconds(url)
        figures = self.server.measure(load)
        seconds = processor_seconds(url) - before
        # The warm-ups are the same in each turn.
        return {**figures, PROCESSOR: seconds / (figures["total_output_tokens"] or 1)}


@dataclass(frozen=True, slots=True)
class Watched:
    """A server while somebody looks at its live view."""

    metered: Metered

    def measure(self, load: Load) -> Mapping[str, Figure]:
        with viewer(self.metered.server.address.base_url):
            return self.metered.measure(load)


def processor_seconds(url: str) -> float:
    """Return the seconds that all threads of a server have run, in user and in system mode.

    Raises `MeasurementError` if the server does not answer, or does not report them.
    """
    try:
        exposition = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).raise_for_status().text
    except httpx.HTTPError as error:
        raise MeasurementError(f"the server's metrics could not be read: {error}") from error
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == "process_cpu_seconds_total":
                return sample.value
    raise MeasurementError("the server does not report its processor time: that needs Linux")


@contextmanager
def viewer(url: str) -> Iterator[None]:
    """Raises `MeasurementError` if the viewer cannot open the view, or loses it."""
    process = subprocess.Popen(
        [sys.executable, "-c", VIEWER, f"{url}/slots/events"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "open\n":
            raise MeasurementError("the viewer could not open the live view")
        yield
        if process.poll() is not None:
            raise MeasurementError("the live view ended before the load")
    finally:
        process.kill()
        process.communicate()


def table(figures: Sequence[Sequence[Mapping[str, Figure]]]) -> tuple[str, float]:
    """Return both medians and the median of the rounds' ratios of each figure, and that of processor time."""
    closed, watched = figures
    lines = [
        f"| median of {len(closed)} rounds | closed | open | open / closed | lowest and highest |",
        "|---|---|---|---|---|",
    ]
    ratios: dict[str, float] = {}
    for title, name, unit in (
        ("tokens/s", THROUGHPUT, 1.0),
        ("processor time of a token (ms)", PROCESSOR, 1e3),
    ):
        medians = [unit * statistics.median(figure[name] or 0 for figure in each) for each in figures]
        by_round = [(one[name] or 0) / (other[name] or 1) for one, other in zip(watched, closed, strict=True)]
        ratios[name] = statistics.median(by_round)
        span = f"{min(by_round):.3f}, {max(by_round):.3f}"
        lines.append(f"| {title} | {medians[0]:.4g} | {medians[1]:.4g} | {ratios[name]:.4f} | {span} |")
    return "\n".join(lines), ratios[PROCESSOR]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if the ratio is above the aim or a measurement failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-prompts", type=int, default=LOAD.num_prompts, help="requests of one turn")
    parser.add_argument("--no-compile", action="store_true", help="measure code that is not compiled")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parsed = parser.parse_args(arguments)
    load = LOAD.model_copy(update={"num_prompts": parsed.num_prompts})
    code = "--no-compile" if parsed.no_compile else "--require-compiled"
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(snapserve(parsed.model, code), Path(folder) / "log") as (url, seconds),
        ):
            server = Metered(HttpServer(Address(url), seconds))
            measured = measure_in_turns([server, Watched(server)], load, parsed.rounds)
        for _, error in measured:
            if error is not None:
                raise error
    except MeasurementError as error:
        print(f"bench.live_view: {error}", file=sys.stderr)
        return 1
    figures = [of_system for of_system, _ in measured]
    text, ratio = table(figures)
    print(text)
    if parsed.json is not None:
        document = {**machine(), "closed": figures[0], "open": figures[1], "ratio": ratio}
        parsed.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if ratio <= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
