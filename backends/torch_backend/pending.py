"""Steps of a backend that are under way, and what they return when they end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from backends.clock import Clock
from backends.interface import (
    BackendError,
    BackendUnusableError,
    BatchResult,
    Draw,
    KeptTokens,
    SampledToken,
    SequencesLostError,
)
from backends.torch_backend.sampling.logprobs import Sampled, steps_to_host


@dataclass(frozen=True, slots=True)
class Outcome:
    """The contents of a `BatchResult`, without the time that the step took."""

    tokens: tuple[tuple[SampledToken, ...], ...]
    prompt_logprobs: tuple[tuple[SampledToken, ...], ...] = ()
    hidden: tuple[tuple[float, ...], ...] = ()
    restore_time: float = 0.0
    importance: tuple[tuple[float, ...], ...] = ()
    kept: tuple[KeptTokens | None, ...] = ()

    def collect(self) -> "Outcome":
        return self

    def result(self, elapsed: float) -> BatchResult:
        return BatchResult(
            self.tokens,
            elapsed,
            self.prompt_logprobs,
            self.hidden,
            self.restore_time,
            self.importance,
            self.kept,
        )


@dataclass(frozen=True, slots=True)
class DecodedSteps:
    """The draws of a launch, on their way to the host's memory."""

    steps: Sequence[Sampled]
    draws: Mapping[int, Draw]  # by slot, in the order of the batch's rows

    def collect(self) -> Outcome:
        """Return the tokens of each row. The device must have reached the end of the launch."""
        tokens = steps_to_host(self.steps, self.draws)
        return Outcome(tuple(tokens[slot] for slot in self.draws))


class Output(Protocol):
    """The output of a step, part of which the device may still be computing."""

    def collect(self) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that has ended: it was computed when it was submitted."""

    outcome: BatchResult | BackendError

    def result(self) -> BatchResult:
        if isinstance(self.outcome, BackendError):
            raise self.outcome
        return self.outcome


@dataclass(frozen=True, slots=True)
class Running:
    """A step that the device may still be computing. `output` is collected once `wait` has returned."""

    clock: Clock
    started: float
    wait: Callable[[], None]
    output: Output

    def result(self) -> BatchResult:
        try:
            self.wait()
            return self.output.collect().result(self.clock.now() - self.started)
        except Exception as error:
            raise failure(error, is_repeatable=False) from error


def failure(error: Exception, *, is_repeatable: bool) -> BackendError:
    """Return the scheduler's error for an exception of a step.

    After an error of the device itself, CUDA refuses all further work: the backend is unusable.
    """
    kind = BackendError if is_repeatable else SequencesLostError
    if isinstance(error, torch.AcceleratorError):
        kind = BackendUnusableError
    wrapped = kind(f"a step failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
