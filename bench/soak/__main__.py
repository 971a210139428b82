"""`python -m bench.soak`: the command. Arguments after `--` are options for the server that it starts."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.soak.plot import plot
from bench.soak.replicas import replicas
from bench.soak.run import Plan, Soak
from bench.soak.target import Target
from bench.systems.servers import Server, serving
from bench.systems.system import MeasurementError

KEYS: Final = ("soak-one", "soak-two", "soak-three", "soak-limited")
LIMIT: Final = 60  # requests of the last key in a minute
# Small limits fill the queue at times, and some steps fail. Time is simulated; tokens are real.
OPTIONS: Final = (
    *("--backend", "sn40l", "--fault", "failed-step=500:2", "--log-level", "error"),
    *("--num-slots", "6", "--slot-capacity", "512", "--max-model-len", "4096"),
    *("--max-num-waiting", "16", "--max-stored-responses", "100"),
)
# Times are real here: a replica must be ready again soon, and lines of batches need slots that are free.
REPLICA_OPTIONS: Final = (
    *("--model", "demo", "--no-compile", "--log-level", "error", "--num-slots", "16"),
    *("--slot-capacity", "512", "--max-model-len", "4096", "--max-num-waiting", "16"),
    *("--max-stored-responses", "200", "--prefix-cache-bytes", "4194304"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak. Return 0 if every count is as expected and memory stayed flat."""
    options = _parser().parse_args(arguments)
    try:
        with _servers(options) as targets:
            own = not options.base_url
            plan = Plan(
                KEYS if own else options.api_key,
                {KEYS[-1]: LIMIT} if own else {},
                options.minutes * 60,
                options.num_clients,
                options.share_cancelled,
                options.seed,
                options.kill_interval,
            )
            result = asyncio.run(Soak(plan, targets).run())
    except MeasurementError as error:
        print(f"bench.soak: {error}", file=sys.stderr)
        return 1
    result["server_options"] = None if options.base_url else list(_server_options(options))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot is not None:
        plot(result, options.plot)
    print(summary(result))
    return 0 if result["holds"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20, help="time for which clients send (default: 20)")
    parser.add_argument("--base-url", help="a running server without other clients (default: start one)")
    parser.add_argument("--replicas", type=int, default=1, help="servers that share their state (default: 1)")
    parser.add_argument(
        "--kill-interval",
        type=float,
        default=40,
        help="mean seconds between two kills of replicas (default: 40)",
    )
    parser.add_argument("--api-key", nargs="*", default=[], help="API keys of that server")
    parser.add_argument("--num-clients", type=int, default=24, help="concurrent clients (default: 24)")
    parser.add_argument(
        "--share-cancelled",
        type=float,
        default=0.2,
        help="share of the requests that their client cancels (default: 0.2)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--plot", type=Path, help="file for a plot of memory and requests over time")
    parser.add_argument("server_options", nargs="*", help="options for the server, after --")
    return parser


def _server_options(options: argparse.Namespace) -> Sequence[str]:
    return (*(REPLICA_OPTIONS if options.replicas > 1 else OPTIONS), *options.server_options)


@contextmanager
def _servers(options: argparse.Namespace) -> Iterator[Sequence[Target]]:
    if options.base_url:
        yield [Target("server", options.base_url)]
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        keys = folder / "keys"
        keys.write_text("\n".join([*KEYS[:-1], f"{KEYS[-1]} requests={LIMIT} tokens=20000", ""]))
        server_options = ("--api-key-file", str(keys), *_server_options(options))
        if options.replicas > 1:
            with replicas(options.replicas, server_options, folder) as started:
                yield started
            return
        own = ("--port", "{port}", "--batch-dir", f"{folder}/batches")
        command = (sys.executable, "-m", "server", "serve", *own, *server_options)
        with serving(Server("snapserve", command, "/ready"), folder / "log") as (url, _):
            yield [Target("server", url)]


def summary(result: dict[str, Any]) -> str:
    """Return the result as text."""
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result["outcomes"].items()))
    lines = [f"{result['sent']} requests in {result['seconds']:.0f} s: {outcomes}"]
    if result["num_servers"] > 1:
        lines.append(f"{result['num_servers']} replicas, {result['num_kills']} kills")
    for check in result["checks"]:
        expected = (
            f"{check['least']:.0f}"
            if check["least"] == check["most"]
            else f"{check['least']:.0f} to {check['most']:.6g}"
        )
        verdict = "ok  " if check["holds"] else "FAIL"
        lines.append(f"{verdict} {check['name']}: {check['found']:.0f}, expected {expected}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
