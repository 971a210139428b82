"""The sub-command `compile`: compiles a model's decode before a server needs it.

It loads the model as `serve` would with the same options, and fills `--compile-cache`. A server of the same
user then starts compiled, on the same kind of processor.
"""

import argparse
import os
import time

from server.options.command_line import OptionError
from server.options.serve import add_serve_options, read_config, with_flags


def configure(parser: argparse.ArgumentParser) -> None:
    add_serve_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Return 0 once all code is in the cache, else 1. Raises `OptionError`."""
    # Torch's backends import torch, which would slow down every other sub-command.
    from backends.clock import WallClock
    from backends.conversion import with_local_model
    from backends.errors import ModelLoadError
    from backends.torch_backend.config import TorchBackendConfig
    from server.serve import prepare

    config = read_config(arguments, os.environ | {"SNAPSERVE_REQUIRE_COMPILED": "yes"})
    if not isinstance(config.backend.config, TorchBackendConfig):
        raise OptionError("only --backend torch compiles")
    prepare(config)
    start = time.monotonic()
    try:
        backend = with_local_model(config.backend).load(WallClock(), vocab_size=0)
        try:
            backend.warmup()
        finally:
            backend.close()
    except ModelLoadError as error:
        print(f"snapserve compile: {with_flags(str(error))}")
        return 1
    print(f"compiled into {config.backend.config.compile_cache} in {time.monotonic() - start:.0f} s")
    return 0
