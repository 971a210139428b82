"""Captured decode steps draw what eager ones draw and never need the host. This is shown on the CPU."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from backends.clock import VirtualClock
from backends.interface import BackendUnusableError
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, Quantization, TorchBackendConfig
from backends.torch_backend.cuda_graphs import Recordable, Recorder
from backends.torch_backend.pending import Outcome, Running
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from cache.scorer import WindowScorer
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import GREEDY, Driver, Request
from tests.backends.oracle import random_prompt
from tests.backends.replaying import ReplayRecorder, readers

SCORER = WindowScorer(observation_window=4)
POLICIES = {
    "full": PolicyOptions(PolicyName.FULL),
    "streaming-llm": PolicyOptions(PolicyName.STREAMING_LLM, num_sink=2, num_recent=30),
    "snapkv": PolicyOptions(PolicyName.SNAPKV, num_recent=100, num_kept=20, scorer=SCORER),
    "snapstream": PolicyOptions(num_sink=4, num_recent=120, num_kept=100, scorer=SCORER),
    "snapstream, lent": PolicyOptions(num_sink=2, num_recent=20, num_kept=10, scorer=SCORER, lend_kept=True),
    "sparse": PolicyOptions(PolicyName.SPARSE, num_sink=2, num_recent=30, num_attended=40),
}
RANDOM = replace(GREEDY, temperature=0.9, seed=7)
SAMPLINGS = (
    GREEDY,
    RANDOM,
    replace(RANDOM, top_k=20, top_p=0.8, min_p=0.02),
    replace(RANDOM, presence_penalty=0.5, repetition_penalty=1.3),
    replace(GREEDY, num_logprobs=3, logit_bias=((5, 2.0),)),
)


def unrecorded(_: Recordable) -> Recordable:
    raise RuntimeError("nothing is recorded")


def open_recorded(
    path: str,
    policy: PolicyOptions,
    recorder: Recorder,
    device: DeviceName = DeviceName.CPU,
    dtype: DtypeName = DtypeName.FLOAT32,
    quantization: Quantization = Quantization.NONE,
) -> TorchBackend:
    pools = (PoolOptions(5, policy),)
    config = TorchBackendConfig(
        path,
        device=device,
        dtype=dtype,
        quantization=quantization,
        pools=pools,
        max_model_len=300,
        prefill_chunk=32,
    )
    backend = TorchBackend(config, recorder=recorder)
    backend.warmup()
    return backend


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Gemma 2's has sliding windows beside the policy, and a softcap; DeepSeek V3's latents and experts.

    LFM2's has states.
    """
    return {
        name: str(save_checkpoint(name, tmp_path_factory.mktemp("checkpoint")))
        for name in ("llama", "gemma2", "deepseek-v3", "lfm2")
    }


def serve_all(backend: TorchBackend) -> list[Request]:
    """Sequences join until the largest shape is full, with every kind of draw, in short and long launches."""
    driver = Driver(backend, 32)
    lengths = (3, 150, 20, 235, 60)
    requests = [
        Request(random_prompt(length, seed=slot), slots=(slot,), sampling=sampling)
        for slot, (length, sampling) in enumerate(zip(lengths, SAMPLINGS, strict=True))
    ]
    for number, request in enumerate(requests, start=1):
        driver.read(request)
        driver.decode(*requests[:number], num_steps=8, steps_a_launch=4)
        driver.decode(request)
        driver.decode(*requests[:number], num_steps=2)
    return requests


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        *(("llama", policy) for policy in POLICIES),
        ("gemma2", "snapstream"),
        ("deepseek-v3", "snapstream"),
        ("lfm2", "snapstream"),
        ("gemma2", "sparse"),
        ("deepseek-v3", "sparse"),
        ("lfm2", "sparse"),
    ],
)
def test_tokens_are_those_of_unrecorded_steps(
    model: str, policy: str, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = ReplayRecorder()
    recorded, plain = (
        open_recorded(checkpoints[model], POLICIES[policy], choice) for choice in (recorder, unrecorded)
    )
    num_recorded = recorder.num_recorded
    assert recorded.num_recorded == num_recorded > 0
    monkeypatch.setattr(recorded, "_decode_unrecorded", None)  # every shape is recorded
    outputs = [[request.outputs for request in serve_all(backend)] for backend in (recorded, plain)]
    assert outputs[0] == outputs[1]
    assert recorder.num_recorded == num_recorded, "nothing is recorded for a request"
    assert recorder.num_replayed > 0


def test_a_step_that_cannot_be_captured_runs_eagerly(
    checkpoints: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    class Refusal(ReplayRecorder):
        def __call__(self, step: Recordable) -> Recordable:
            if self.num_recorded == 2:
                return super().__call__(lambda: step() if torch.ones(1).item() else None)
            return super().__call__(step)

    with caplog.at_level(logging.WARNING):
        backend = open_recorded(checkpoints["llama"], POLICIES["snapstream"], recorder := Refusal())
    assert "not permitted" in caplog.text
    requests, plain = (
        serve_all(backend),
        serve_all(open_recorded(checkpoints["llama"], POLICIES["snapstream"], unrecorded)),
    )
    assert [request.outputs for request in requests] == [request.outputs for request in plain]
    assert recorder.num_replayed == backend.num_recorded == 0


@pytest.mark.parametrize(("model", "is_warned"), [("deepseek-v3", True), ("llama", False)])
def test_experts_that_are_not_quantised_are_reported(
    model: str, checkpoints: dict[str, str], caplog: pytest.LogCaptureFixture, *, is_warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        open_recorded(checkpoints[model], POLICIES["full"], ReplayRecorder(), quantization=Quantization.INT8)
    assert ("they keep their type" in caplog.text) == is_warned


def test_a_running_step_is_waited_for_and_its_failure_is_raised() -> None:
    clock, order = VirtualClock(), list[str]()

    def wait() -> None:
        clock.elapse(2.0)
        order.append("wait")

    class Output:
        def collect(self) -> Outcome:
            assert order == ["wait"]
            return Outcome(())

    assert Running(clock, clock.now(), wait, Output()).result().elapsed == 2.0

    def fail() -> None:
        raise torch.AcceleratorError("device-side assert triggered")

    with pytest.raises(BackendUnusableError, match="device-side"):
        Running(clock, clock.now(), fail, Output()).result()


@pytest.mark.parametrize(
    "waits", [lambda: torch.ones(1).item(), lambda: torch.tensor([1]), lambda: torch.ones(2).nonzero()]
)
def test_the_recorder_refuses_what_a_cuda_graph_would(waits: Callable[[], object]) -> None:
    def step() -> None:
        waits()

    with torch.inference_mode(), pytest.raises(RuntimeError, match="not permitted"):
        ReplayRecorder()(step)


def test_each_entry_is_read_once_in_place(checkpoints: dict[str, str]) -> None:
    """A decode step makes one product of each layer's keys and one of its values, and no copy of them."""
    backend = open_recorded(checkpoints["llama"], POLICIES["snapstream"], recorder := ReplayRecorder())
    for layer in backend.pools[0].cache.layers:
        keys, values = (readers(recorder.records[0], plane) for plane in layer.slots.planes)
        assert (keys, values) == (["baddbmm.default"], ["bmm.default"])
