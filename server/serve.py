"""`snapserve serve`: its arguments, and a place to listen. What is served is made by `server.process`."""

import argparse
import logging
import os
import socket

from server.config import GROUPS, ProcessConfig, read_config
from server.options import OptionError, add_options

NAME = "serve"
SUMMARY = "Serve a model over the OpenAI API."


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, GROUPS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to end; return 0, or 1 when the model cannot be loaded."""
    config = read_config(arguments, os.environ)
    # PyTorch's threads would otherwise wait for each other spinning; where anything else wants a core, each step then loses a time slice.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with listen(config.process) as listener:
        from server.process import run_process

        logging.basicConfig(level=config.process.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        return run_process(config, listener)


def listen(process: ProcessConfig) -> socket.socket:
    """Return a bound socket. Raises `OptionError` when the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(process.host, process.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=2048)
    except OSError as error:
        raise OptionError(f"cannot listen on --host {process.host} --port {process.port}: {error.strerror}") from error
