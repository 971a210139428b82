"""A backend's kernels and graphs, loaded from the compile cache or first built by a background process.

A backend runs without them, only slower. The process that builds has the lowest priority, so that it hardly
slows the requests that are served meanwhile.
"""

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from backends.torch_backend.compiled.build import (
    KERNELS,
    build_folder,
    code_folder,
    graph_path,
    source_path,
    unpacked_folder,
)
from backends.torch_backend.compiled.decode_step import DecodeStepGraphs
from backends.torch_backend.compiled.layers import LayerGraphs
from backends.torch_backend.native.kernels import Kernels, load_kernels
from backends.torch_backend.pool import TorchPool
from backends.torch_backend.torch_private import lacks_interfaces

logger = logging.getLogger(__name__)

# How long the work waits for the first moment without a request. Then it is done between steps.
_PATIENCE = 10.0  # seconds

# `bench.start` reads the times from the log.
COMPILED_MESSAGE = "decode is compiled: traced in %.1f s, compiled in %.1f s, loaded in %.2f s"


@dataclass
class CodeTimes:
    """Seconds. `compile` is 0 where all code is on disk."""

    trace: float = 0.0
    compile: float = 0.0
    load: float = 0.0


class CompiledCode:
    """Builds and loads the code of one backend, for the thread that runs its steps."""

    def __init__(
        self,
        cache: Path,
        model: PreTrainedModel,
        pools: Sequence[TorchPool],
        max_position: int,
        kernels: Kernels,
    ) -> None:
        self.times = CodeTimes()
        self._folder = code_folder(cache)
        self._kernels = kernels
        self._layers = LayerGraphs(model, kernels)
        self.steps = tuple(
            DecodeStepGraphs(model, self._layers.layers, pool, max_position, kernels) for pool in pools
        )
        self._keys: tuple[str, ...] = ()
        self._work: Iterator[None] = iter(())  # up to the load, or the start of the process that builds
        self._work_begins = 0.0  # when it no longer waits for idle time
        self._is_pending = False
        self._have_kernels_failed = False
        self._build_started = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Let `proceed` and `poll` do the work. The warm-up must have run every kind of step before."""
        self._work = self._prepared()
        self._work_begins = time.monotonic() + _PATIENCE

    def proceed(self) -> bool:
        """Do the next part of the work, which takes up to a second. Return whether there was one."""
        try:
            next(self._work)
        except StopIteration:
            return False
        # Any exception: models' code is traced here, and without compiled code they are served all the same.
        except Exception:
            logger.warning("decode runs uncompiled, since it cannot be traced", exc_info=True)
            self._work = iter(())
        return True

    def _prepared(self) -> Iterator[None]:
        """Trace the graphs and load their code, or start to build it, in parts."""
        start = time.monotonic()
        if lacks_interfaces(for_compiling=True):  # this imports torch's compiler
            return
        self.times.trace += time.monotonic() - start
        yield
        start = time.monotonic()
        sources = self._layers.trace()
        self.times.trace += time.monotonic() - start
        yield
        start = time.monotonic()
        step_sources = [step.trace() for step in self.steps]
        if all(step_sources):
            sources = {}  # no step calls a layer's own graph
        for step_source in step_sources:
            sources |= step_source
        self._keys = tuple(sources)
        self.times.trace += time.monotonic() - start
        yield
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for key, source in sources.items():
                _write(source_path(self._folder, key), source.to_json())
        except OSError as error:
            logger.warning("decode runs uncompiled, since the compile cache cannot be written: %s", error)
            return
        self._is_pending = True
        self._build_started = time.monotonic()
        if not self._is_built():
            self._build()
        self.poll()

    def poll(self) -> None:
        """Load the code between two steps if it has become ready, and do work that has waited long enough."""
        if self._is_pending:
            self._use_kernels()
        if self._is_pending and (self._process is None or self._process.poll() is not None):
            self._is_pending = False
            self._finish()
        elif not self._is_pending and time.monotonic() > self._work_begins:
            self.proceed()

    def wait(self) -> None:
        """Do all of the work, wait for the code, and load it."""
        while self.proceed():
            pass
        if self._process is not None:
            self._process.wait()
        self.poll()

    def close(self) -> None:
        """Stop building."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _is_built(self) -> bool:
        graphs = (graph_path(self._folder, key) for key in self._keys)
        return all(path.exists() for path in (self._folder / KERNELS, *graphs))

    def _build(self) -> None:
        logger.info("compiling decode in the background, into %s", self._folder)
        module = "backends.torch_backend.compiled.build"
        command = [sys.executable, "-m", module, str(self._folder), *self._keys]
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(build_folder(self._folder)),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            # Waking threads of a step preempt a process of the idle class at once, but not one that is only
            # nice.
            os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
        except OSError:  # containers may forbid it
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)

    def _finish(self) -> None:
        """Load the code, and log how it was made or why there is none."""
        if self._process is not None:
            self.times.compile = time.monotonic() - self._build_started
            if self._process.returncode != 0:
                report = self._log.read_text(errors="replace").strip()
                logger.warning("decode runs uncompiled, since compiling failed: %s", report[-2000:])
        if not self._is_built():
            return
        start = time.monotonic()
        try:
            self._load()
        # Any exception: torch reads files that another version or a full disk may have corrupted.
        except Exception as error:
            logger.warning(
                "decode runs uncompiled, since its code cannot be loaded; the next start compiles it again: "
                "%s: %s",
                type(error).__name__,
                error,
            )
            self._delete_code()
            return
        self.times.load = time.monotonic() - start
        if self._keys:
            logger.info(COMPILED_MESSAGE, self.times.trace, self.times.compile, self.times.load)
        else:
            logger.warning(
                "no layer of the model has a graph: decode runs uncompiled, but with the native kernels"
            )

    def _use_kernels(self) -> None:
        """Use the kernels without waiting for the graphs: they read prompts faster, too."""
        path = self._folder / KERNELS
        if self._kernels.are_used or self._have_kernels_failed or not path.exists():
            return
        try:
            load_kernels(path)
            self._kernels.use()
        except (OSError, RuntimeError):  # `_finish` tries again, and reports it
            self._have_kernels_failed = True

    def _delete_code(self) -> None:
        with suppress(OSError):
            for key in self._keys:
                graph_path(self._folder, key).unlink(missing_ok=True)
            (self._folder / KERNELS).unlink(missing_ok=True)
            shutil.rmtree(unpacked_folder(self._folder))

    def _load(self) -> None:
        # Not at the top: this imports torch's compiler, which takes a second.
        from backends.torch_backend.torch_private.inductor import load_compiled

        # A graph's file is unpacked into inductor's own folder.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(unpacked_folder(self._folder))
        load_kernels(self._folder / KERNELS)
        graphs = {key: load_compiled(graph_path(self._folder, key)) for key in self._keys}
        self._kernels.use()  # first: this packs weights that the graphs read
        self._layers.use(graphs)
        for step in self.steps:
            step.use(graphs)


def _write(path: Path, text: str) -> None:
    """Write a file in one piece: the process that builds never sees a part of it."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
