"""Steps that fail midway, with part of their writes done: what follows is as if nothing had happened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.clock import WallClock
from backends.interface import SamplingParams
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.forward.cache import CacheLayer
from backends.torch_backend.sampling import sampler
from backends.torch_backend.sampling.logprobs import log_probabilities
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.scorer import WindowScorer
from scheduler.messages import AdmittedAdd, FinishReason
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import open_backend
from tests.backends.oracle import random_prompt
from tests.scheduler.drive import Drive, request

POLICY = PolicyOptions(num_sink=2, num_recent=12, num_kept=8, scorer=WindowScorer(observation_window=4))
SPARSE = PolicyOptions(PolicyName.SPARSE, num_sink=2, num_recent=12, num_attended=8)
PENALISED = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, num_logprobs=2
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def backend(checkpoint: Path) -> TorchBackend:
    return open_backend(checkpoint, POLICY, max_model_len=128)


def adds() -> list[AdmittedAdd]:
    """A prompt of several chunks that is packed, two that fit their slots, and rings that wrap."""
    return [
        request("packed", max_tokens=30, sampling=PENALISED, prompt_token_ids=tuple(random_prompt(70))),
        request("short", max_tokens=25, sampling=PENALISED, prompt_token_ids=tuple(random_prompt(6))),
        request("both", max_tokens=20, num_choices=2, prompt_token_ids=tuple(random_prompt(9))),
    ]


def answers(drive: Drive) -> dict[tuple[str, int], list[int]]:
    assert {drive.final(*key).reason for key in drive.outputs} == {FinishReason.LENGTH}
    return {key: drive.tokens(*key) for key in sorted(drive.outputs)}


def drive_of(backend: TorchBackend) -> Drive:
    backend._clock = WallClock()
    return Drive(backend=backend)


@pytest.fixture(scope="module")
def expected(backend: TorchBackend) -> dict[tuple[str, int], list[int]]:
    drive = drive_of(backend)
    drive.run(*adds())
    assert drive.num_failed == 0
    return answers(drive)


def failing(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return the function, whose call `number` fails once it has done its work."""
    num_calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        result = function(*args, **kwargs)
        if num_calls == number:
            raise MemoryError("no memory for the rest of the step")
        return result

    return call


@pytest.mark.parametrize("number", [1, 2, 7, 11, 17, 25, 26, 27, 40, 61, 80])
def test_a_step_that_fails_after_some_layers_is_repeated(
    backend: TorchBackend,
    expected: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.setattr(CacheLayer, "write", failing(CacheLayer.write, number))
    drive = drive_of(backend)
    drive.run(*adds())
    assert answers(drive) == expected


@pytest.mark.parametrize("number", [1, 4, 9, 20])
def test_a_draw_that_fails_is_counted_once(
    backend: TorchBackend,
    expected: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.setattr(sampler, "log_probabilities", failing(log_probabilities, number))
    drive = drive_of(backend)
    drive.run(*adds())
    assert answers(drive) == expected


@pytest.mark.parametrize("name", ["pack", "clear_scratch", "observe"])
def test_a_prompt_that_fails_is_read_again(
    backend: TorchBackend,
    expected: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(CacheLayer, name, failing(getattr(CacheLayer, name), 2))
    drive = drive_of(backend)
    drive.run(*adds())
    assert drive.num_failed == 1
    assert answers(drive) == expected


def test_a_state_that_has_advanced_does_not_advance_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that fails is read again; a decode step that fails ends its sequence."""
    backend = open_backend(save_checkpoint("lfm2", tmp_path), POLICY, max_model_len=128)
    add = request("a", max_tokens=12, prompt_token_ids=tuple(random_prompt(50)))
    plain = drive_of(backend)
    plain.run(add)
    for number, reason in ((1, FinishReason.LENGTH), (2, FinishReason.LENGTH), (12, FinishReason.ERROR)):
        with monkeypatch.context() as patch:
            patch.setattr(CacheLayer, "write", failing(CacheLayer.write, number))
            drive = drive_of(backend)
            drive.run(add)
        assert (drive.final("a").reason, drive.num_failed) == (reason, 1)
        assert drive.tokens("a") == plain.tokens("a")[: len(drive.tokens("a"))]


def test_a_store_that_was_written_is_not_written_twice(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that a decode step overwrites is in the store then: its sequence ends with an error."""
    drive = drive_of(open_backend(checkpoint, SPARSE, max_model_len=128))
    monkeypatch.setattr(CacheLayer, "_demote", failing(CacheLayer._demote, 4))
    drive.run(request("a", max_tokens=30, prompt_token_ids=tuple(random_prompt(9))))
    assert (drive.final("a").reason, drive.num_failed) == (FinishReason.ERROR, 1)
