"""The sub-command `bench`: its options, and its exit status."""

import argparse
import asyncio
import os
import sys

from commands.loadtest.config import BenchOptions, read_config
from server.options.command_line import add_options, groups_of


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, groups_of(BenchOptions))


def run(arguments: argparse.Namespace) -> int:
    """Return 0, or 1 where requests failed or a server could not be loaded. Raises `OptionError`."""
    config = read_config(arguments, os.environ)
    # httpx would slow down every other sub-command.
    from commands.loadtest.measure import measure
    from commands.loadtest.output import write_results
    from commands.loadtest.target import TargetError

    try:
        result = asyncio.run(measure(config))
    except TargetError as error:
        print(f"snapserve bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("snapserve bench: interrupted", file=sys.stderr)
        return 130
    write_results(config, result)
    return int(result.has_failures and not config.failures_are_allowed)
