"""The `snapserve` command and its sub-commands.

A sub-command is a module with `configure(parser)` and `run(arguments)`, which returns the exit status. Only
the one that runs is imported: the options of the others would slow it down. Heavy imports belong into `run`:
they would slow down `--help`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from server.options.command_line import OptionError
from server.version import server_version


class Command(Protocol):
    """The interface of a sub-command's module."""

    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


# The module of each sub-command, and its line in the help.
COMMANDS = {
    "serve": ("server.serve", "Serve a model over the OpenAI API."),
    "chat": ("commands.chat", "Chat with a running server in the terminal."),
    "check": (
        "commands.check",
        "Say from a model's configuration whether it is served, and what memory its slots take.",
    ),
    "compile": (
        "commands.compile",
        "Compile a model's decode ahead, for a server with the same options.",
    ),
    "bench": (
        "commands.loadtest.command",
        "Load an OpenAI-compatible server and report its latencies and throughput.",
    ),
    "eval": (
        "commands.eval.command",
        "Measure what a cache policy costs in answers, read from packed slots.",
    ),
    "simulate": (
        "commands.simulate.command",
        "Plan capacity, replay traffic and check published figures on a simulated machine.",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    It is 2 for invalid options, and 1 when the reader of standard output has closed it.
    """
    words = sys.argv[1:] if arguments is None else arguments
    name = ""
    try:
        parsed = make_parser(words[0] if words else None).parse_args(words)
        name = f" {parsed.command}"
        status = _command(parsed.command).run(parsed)
        sys.stdout.flush()
    except OptionError as error:
        print(f"snapserve{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Python flushes standard output again at exit. The rest of the text goes to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def make_parser(name: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows all sub-commands, and the options of this one."""
    parser = argparse.ArgumentParser(
        prog="snapserve", description="LLM inference over fixed-size, SnapStream-compressed KV-cache slots."
    )
    parser.add_argument("--version", action="version", version=f"snapserve {server_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, (_, summary) in COMMANDS.items():
        added = commands.add_parser(command, help=summary, description=summary, allow_abbrev=False)
        if command == name:
            _command(name).configure(added)
    return parser


def _command(name: str) -> Command:
    return cast(Command, import_module(COMMANDS[name][0]))
