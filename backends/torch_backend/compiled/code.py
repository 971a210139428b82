"""A backend's kernels and graphs, loaded from the compile cache or first built by a background process.

A backend runs without them, only slower. With the kernels alone, which may come with the package, it runs the
graphs as they were traced. The process that builds has the lowest priority at first, so that it hardly slows
the requests that are served meanwhile. Where they leave it too little time, it goes on at their priority.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from backends.interface import BackendUnusableError, CodeState
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
from backends.torch_backend.compiled.trace import Compiled, GraphSource
from backends.torch_backend.compiled.trust import UntrustedError, make_private, verify
from backends.torch_backend.files import write_whole
from backends.torch_backend.native.kernels import Kernels, load_kernels
from backends.torch_backend.native.packaged import packaged_kernels
from backends.torch_backend.pool import TorchPool
from backends.torch_backend.torch_private import lacks_interfaces
from backends.torch_backend.torch_private.graph_code import function_of

logger = logging.getLogger(__name__)

_BUILD = (sys.executable, "-m", "backends.torch_backend.compiled.build")

# How long the work waits for the first moment without a request. Then it is done between steps.
_PATIENCE = 10.0  # seconds

# How long the process that builds has the lowest priority. Beside 12 clients it got so little time that it
# had not ended after 100 s.
_LOW_PRIORITY_TIME = 45.0  # seconds

_IDLE_WAIT = 0.02  # seconds for which an idle engine waits for the process before it looks for requests

# `bench.start` reads the times from the log.
COMPILED_MESSAGE = "decode is compiled: traced in %.1f s, compiled in %.1f s, loaded in %.2f s"


@dataclass
class CodeTimes:
    """Seconds. `compile` is 0 where all code is on disk."""

    trace: float = 0.0
    compile: float = 0.0
    load: float = 0.0


class CompiledCode:
    """Builds and loads the code of one backend, for the thread that runs its steps.

    Without pools, as for a draft, there is nothing to compile. It then uses the kernels once they are there,
    with the package or built for the model that answers.
    """

    def __init__(
        self,
        cache: Path,
        model: PreTrainedModel,
        pools: Sequence[TorchPool],
        max_position: int,
        kernels: Kernels,
    ) -> None:
        self.times = CodeTimes()
        self.state = CodeState.BUILDING
        self._folder = code_folder(cache)
        self._packaged = packaged_kernels()
        self._kernels = kernels
        self._layers = LayerGraphs(model, kernels)
        self.steps = tuple(
            DecodeStepGraphs(model, self._layers.layers, pool, max_position, kernels) for pool in pools
        )
        self._sources: Mapping[str, GraphSource] = {}  # by key
        self._work: Iterator[None] = iter(())  # up to the load, or the start of the process that builds
        self._work_begins = 0.0  # when it no longer waits for idle time
        self._is_pending = False
        self._is_trusted = False  # the folder is this user's own
        self._have_kernels_failed = False
        self._build_started = 0.0
        self._is_urgent = False  # the process that builds has the priority of this one
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Let `proceed` and `poll` do the work. The warm-up must have run every kind of step before."""
        self._work = self._prepared()
        self._work_begins = time.monotonic() + _PATIENCE

    def proceed(self) -> bool:
        """Do the next part of the work, which takes up to a second. Return whether there was one."""
        try:
            next(self._work)
        except StopIteration:
            return self._await_process()
        except BackendUnusableError:
            raise
        # Any other exception: models' code is traced here, and they are served without compiled code too.
        except Exception:
            logger.warning("decode runs uncompiled, since it cannot be traced", exc_info=True)
            self.state = CodeState.FAILED
            self._work = iter(())
        return True

    def _await_process(self) -> bool:
        """Wait a moment for the process that builds, if there is one, so that its code is soon loaded."""
        if not self._is_pending or self._process is None:
            return False
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_IDLE_WAIT)
        self.poll()
        return True

    def _prepared(self) -> Iterator[None]:
        """Trace the graphs and load their code, or start to build it, in parts."""
        start = time.monotonic()
        if lacks_interfaces(for_compiling=True):  # this imports torch's compiler
            self.state = CodeState.FAILED
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
        self._sources = sources
        self.times.trace += time.monotonic() - start
        yield
        try:
            make_private(self._folder)
            for key, source in sources.items():
                write_whole(source_path(self._folder, key), source.to_json())
            self._is_trusted = True
        except (OSError, UntrustedError) as error:
            logger.warning("nothing is compiled, since the compile cache cannot be used: %s", error)
        self._is_pending = True
        self._build_started = time.monotonic()
        if self.steps and self._is_trusted and not self._is_built():
            self._build()
        self.poll()

    def poll(self) -> None:
        """Load the code between two steps if it has become ready, and do work that has waited long enough."""
        if self._is_pending:
            self._use_kernels()
            self._hurry()
        if self._is_pending and not self.steps:
            self._is_pending = not (self._kernels.are_used or self._have_kernels_failed)
        elif self._is_pending and (self._process is None or self._process.poll() is not None):
            self._is_pending = False
            self._finish()
        elif not self._is_pending and time.monotonic() > self._work_begins:
            self.proceed()

    def wait(self) -> None:
        """Do all of the work at once, wait for the code, and load it."""
        self._is_urgent = True
        while self.proceed():
            pass

    def close(self) -> None:
        """Stop building."""
        self._stop()
        for process in self._stopped:
            process.wait()

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _is_built(self) -> bool:
        graphs = (graph_path(self._folder, key) for key in self._sources)
        return all(path.exists() for path in (self._kernels_path, *graphs))

    @property
    def _kernels_path(self) -> Path:
        return self._packaged or self._folder / KERNELS

    def _build(self) -> None:
        if not _has_compiler():
            return
        logger.info("decode is not compiled yet: compiling in the background, into %s", self._folder)
        command = [*_BUILD, str(self._folder), *self._sources]
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(build_folder(self._folder)),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        with self._log.open("wb") as log:
            # In a group of its own, to be stopped with the compilers that it starts. In a session of its own,
            # Linux' automatic grouping would give it as much time as the server has, at any priority.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        if self._is_urgent:
            return
        try:
            # Waking threads of a step preempt a process of the idle class at once, but not one that is only
            # nice.
            os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
        except OSError:  # containers may forbid it
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)

    def _hurry(self) -> None:
        """Let the process that builds go on at this process's priority, if it has had its time at the lowest.

        A process may not raise its priority, so another one takes over. Finished files are kept.
        """
        is_late = time.monotonic() > self._build_started + _LOW_PRIORITY_TIME
        if is_late and not self._is_urgent and self._process is not None and self._process.poll() is None:
            logger.info("compiling goes on at normal priority, since the requests leave it too little time")
            self._stop()
            self._is_urgent = True
            self._build()

    def _stop(self) -> None:
        """Kill the process that builds, and its compilers. The idle class may take seconds to die."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._stopped.append(self._process)

    def _finish(self) -> None:
        """Load the code, and log how it was made or why there is none."""
        self.state = CodeState.FAILED
        if self._process is not None:
            self.times.compile = time.monotonic() - self._build_started
            if self._process.returncode != 0:
                report = self._log.read_text(errors="replace").strip()
                logger.warning("decode is not compiled, since compiling failed: %s", report[-2000:])
        # torch needs the compiler to load a graph, too.
        if not self._is_trusted or not self._is_built() or not _has_compiler():
            how = "as traced, with the native kernels" if self._kernels.are_used else "uncompiled"
            if self._kernels.are_used and self._is_trusted and self._process is None:
                self.state = CodeState.KERNELS
            why = "" if _has_compiler() else f", since there is no C++ compiler {_compiler()}"
            logger.warning("nothing is compiled%s: decode runs %s", why, how)
            return
        start = time.monotonic()
        try:
            self._load()
        except BackendUnusableError:
            raise
        # Any other exception: torch reads files that another version or a full disk may have corrupted.
        except Exception as error:
            logger.warning(
                "decode is not compiled, since its code cannot be loaded; the next start compiles it again: "
                "%s: %s",
                type(error).__name__,
                error,
            )
            self._delete_code()
            return
        self.times.load = time.monotonic() - start
        self.state = CodeState.COMPILED if self._sources else CodeState.KERNELS
        if self._sources:
            logger.info(COMPILED_MESSAGE, self.times.trace, self.times.compile, self.times.load)
        else:
            logger.warning(
                "no layer of the model has a graph: decode runs uncompiled, but with the native kernels"
            )

    def _use_kernels(self) -> None:
        """Use the kernels without waiting for the graphs: they read prompts faster, too."""
        path = self._kernels_path
        is_usable = self._packaged is not None or self._is_trusted
        if self._kernels.are_used or self._have_kernels_failed or not is_usable or not path.exists():
            return
        try:
            self._load_kernels()
            self._kernels.use()
            self._use({key: _as_traced(source) for key, source in self._sources.items()})
        except (OSError, RuntimeError, UntrustedError):  # `_finish` tries again, and reports it
            self._have_kernels_failed = True

    def _load_kernels(self) -> None:
        if self._packaged is None:
            verify(self._kernels_path)
        load_kernels(self._kernels_path)

    def _use(self, graphs: Mapping[str, Compiled]) -> None:
        """Run these graphs from the next step on."""
        self._layers.use(graphs)
        for step in self.steps:
            step.use(graphs)

    def _delete_code(self) -> None:
        """Delete the graphs of all models: one whose library is gone would be compiled while it is loaded."""
        with suppress(OSError):
            for path in self._folder.glob("*.graph"):
                path.unlink(missing_ok=True)
            (self._folder / KERNELS).unlink(missing_ok=True)
            shutil.rmtree(unpacked_folder(self._folder))

    def _load(self) -> None:
        # Not at the top: this imports torch's compiler, which takes a second.
        from backends.torch_backend.torch_private.inductor import load_compiled

        files = [graph_path(self._folder, key) for key in self._sources]
        for path in (*files, *unpacked_folder(self._folder).rglob("*.so")):
            verify(path)
        # A graph's file is unpacked into inductor's own folder.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(unpacked_folder(self._folder))
        self._load_kernels()
        graphs = {key: load_compiled(path) for key, path in zip(self._sources, files, strict=True)}
        self._kernels.use()  # first: this packs weights that the graphs read
        self._use(graphs)


def load_built_kernels(cache: Path) -> bool:
    """Load the kernels of the package, or those that an earlier start built. Return whether there are any."""
    try:
        path = packaged_kernels()
        if path is None:
            folder = code_folder(cache)
            make_private(folder)
            path = folder / KERNELS
            verify(path)
        load_kernels(path)
    except (OSError, RuntimeError, UntrustedError):  # those of `CompiledCode` are reported
        return False
    return True


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _has_compiler() -> bool:
    return shutil.which(_compiler()) is not None


def _as_traced(source: GraphSource) -> Compiled:
    """Return a graph that Python runs, operator by operator. Beside the kernels, few are left."""
    forward = function_of(source.code)

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        output = forward(None, *tensors)
        return (output,) if isinstance(output, Tensor) else output  # type: ignore[return-value]

    return run
