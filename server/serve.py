"""`snapserve serve`: its arguments, and a place to listen. What is served is made by `server.process`."""

import argparse
import contextlib
import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec

from server.batches.disk import FolderError
from server.batches.service import Batches
from server.logs import configure_logging
from server.options.command_line import OptionError
from server.options.serve import ProcessOptions, add_serve_options, read_config, with_flags
from server.options.settings import BatchSettings

NAME = "serve"
SUMMARY = "Serve a model over the OpenAI API."

# How long PyTorch's threads wait for each other awake: about 0.1 ms, which covers the gaps within a decode step. Asleep at once, each of
# the step's hundred meetings costs a wake-up; awake for ever, as is the default, they keep a core from whatever else wants it.
SPIN_COUNT = "5000"


def configure(parser: argparse.ArgumentParser) -> None:
    add_serve_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to end; return 0, or 1 when the model cannot be loaded."""
    config = read_config(arguments, os.environ)
    if config.is_traced and find_spec("opentelemetry.sdk") is None:
        raise OptionError(
            "--otlp-endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) needs: pip install 'snapserve[otel]'"
        )
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(config.process))
        batches = stack.enter_context(open_batches(config.server.batches))
        from server.process import run_process

        configure_logging(config.process.log_level.upper(), config.process.log_format)
        return run_process(config, listener, batches)


@contextlib.contextmanager
def open_batches(settings: BatchSettings | None) -> Iterator[Batches | None]:
    """Take the folder of files and batches, where there is to be one. Raises `OptionError` when it cannot be had."""
    if settings is None:
        yield None
        return
    try:
        batches = Batches(settings)
    except FolderError as error:
        raise OptionError(with_flags(str(error))) from error
    with batches:
        yield batches


def listen(process: ProcessOptions) -> socket.socket:
    """Return a bound socket. Raises `OptionError` when the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            process.host, process.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=2048)
    except OSError as error:
        raise OptionError(
            f"cannot listen on --host {process.host} --port {process.port}: {error.strerror}"
        ) from error
