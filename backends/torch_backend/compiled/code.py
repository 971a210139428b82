"""A backend's kernels and graphs: taken from the folder where they are kept, or built by a process in the background and taken then.

Whatever cannot be had is done without: decode steps are then slower and nothing else. The process that builds runs where nobody else wants
to, so that requests which are served meanwhile hardly notice.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from backends.torch_backend.compiled.build import KERNELS, code_folder, graph_path, source_path
from backends.torch_backend.compiled.decode_step import StepGraphs
from backends.torch_backend.compiled.layers import LayerGraphs
from backends.torch_backend.native.kernels import Kernels, load_kernels
from backends.torch_backend.pool import TorchPool
from backends.torch_backend.torch_private.inductor import load_compiled

logger = logging.getLogger(__name__)

TOLD = "decode is compiled: traced in %.1f s, compiled in %.1f s, loaded in %.2f s"  # bench.start reads it


@dataclass
class CodeTimes:
    """Seconds. Nothing is compiled where all is on disk."""

    trace: float = 0.0
    compile: float = 0.0
    load: float = 0.0


class CompiledCode:
    """Builds and loads the code of one backend, for the thread that runs its steps."""

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        pools: Sequence[TorchPool],
        max_position: int,
        kernels: Kernels,
    ) -> None:
        self.times = CodeTimes()
        self._folder, self._kernels = code_folder(folder), kernels
        self._layers = LayerGraphs(model, kernels)
        self.steps = tuple(
            StepGraphs(model, self._layers.layers, pool, max_position, kernels) for pool in pools
        )
        self._keys: tuple[str, ...] = ()
        self._is_pending = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Trace the graphs, once a decode step has been run, and take the code or have it built."""
        start = time.monotonic()
        layers = self._layers.trace()
        steps = [step.trace() for step in self.steps]
        sources = {} if all(steps) else layers
        for step in steps:
            sources |= step
        self._keys, self.times.trace = tuple(sources), time.monotonic() - start
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for key, source in sources.items():
                _write(source_path(self._folder, key), source.to_json())
        except OSError as error:
            logger.warning("nothing is compiled: %s", error)
            return
        self._is_pending, self._start = True, time.monotonic()
        if not self._is_built():
            self._build()
        self.poll()

    def poll(self) -> None:
        """Take the code between two steps if it has become ready."""
        if self._is_pending and (self._process is None or self._process.poll() is not None):
            self._is_pending = False
            self._take()

    def wait(self) -> None:
        """Wait for the code, and take it."""
        if self._process is not None:
            self._process.wait()
        self.poll()

    def close(self) -> None:
        """Build no more."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _is_built(self) -> bool:
        return all(
            path.exists()
            for path in (self._folder / KERNELS, *(graph_path(self._folder, key) for key in self._keys))
        )

    def _build(self) -> None:
        logger.info("compiling for decode in the background, into %s", self._folder)
        command = [sys.executable, "-m", "backends.torch_backend.compiled.build", str(self._folder)]
        environment = (
            os.environ | _inductor_environment(self._folder) | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        )
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            os.sched_setscheduler(
                self._process.pid, os.SCHED_IDLE, os.sched_param(0)
            )  # a step's threads that wake get its core at once
        except OSError:  # as a container may
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)

    def _take(self) -> None:
        if self._process is not None:
            self.times.compile = time.monotonic() - self._start
            if self._process.returncode != 0:
                report = self._log.read_text(errors="replace").strip()
                logger.warning("decode stays as it is, since compiling failed: %s", report[-2000:])
        if not self._is_built():
            return
        start = time.monotonic()
        os.environ.update(_inductor_environment(self._folder))  # where a graph's file is unpacked
        try:
            load_kernels(self._folder / KERNELS)
            graphs = {key: load_compiled(graph_path(self._folder, key)) for key in self._keys}
        except Exception as error:  # files of another's making, read by torch: whatever is wrong with them, there is another way
            logger.warning(
                "decode stays as it is, since its code cannot be loaded: %s: %s", type(error).__name__, error
            )
            return
        self._layers.use(graphs)
        for step in self.steps:
            step.use(graphs)
        self._kernels.use()
        self.times.load = time.monotonic() - start
        times = self.times
        if graphs:
            logger.info(TOLD, times.trace, times.compile, times.load)
        else:
            logger.warning("no layer of the model has a graph: decode runs as it is, with the kernels' help")


def _inductor_environment(folder: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def _write(path: Path, text: str) -> None:
    """Write a file that nobody sees half written."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
