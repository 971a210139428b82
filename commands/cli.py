"""The `snapserve` command and its sub-commands.

A sub-command is a module with `NAME`, `SUMMARY`, `configure(parser)` and `run(arguments)`, which returns the
exit status. Heavy imports belong into `run`: they would slow down `--help` and every other sub-command.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from commands import chat, check, simulate
from commands import compile as compilation
from commands.eval import command as evaluation
from commands.loadtest import command as bench
from server import serve
from server.options.command_line import OptionError
from server.version import server_version


class Command(Protocol):
    """The interface of a sub-command's module."""

    NAME: str
    SUMMARY: str

    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


COMMANDS: tuple[Command, ...] = (serve, chat, check, compilation, bench, evaluation, simulate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    It is 2 for invalid options, and 1 when the reader of standard output has closed it.
    """
    name = ""
    try:
        parsed = make_parser().parse_args(arguments)
        name = f" {parsed.command}"
        command = next(command for command in COMMANDS if parsed.command == command.NAME)
        status = command.run(parsed)
        sys.stdout.flush()
    except OptionError as error:
        print(f"snapserve{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Python flushes standard output again at exit. The rest of the text goes to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="snapserve", description="LLM inference over fixed-size, SnapStream-compressed KV-cache slots."
    )
    parser.add_argument("--version", action="version", version=f"snapserve {server_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.configure(
            commands.add_parser(
                command.NAME, help=command.SUMMARY, description=command.SUMMARY, allow_abbrev=False
            )
        )
    return parser
