"""The trace of a step has the times and bytes of the step itself."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sn40l.step.decode import decode_step
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.trace import bandwidth, chrome_trace
from tests.backends.sn40l.strategies import deployments, model, roomy, sn40l


@settings(deadline=None)
@given(deployments(roomy()), st.integers(1, 64), st.floats(1e-6, 1e-3))
def test_bandwidth_over_time_adds_up_to_the_bytes(
    deployment: Deployment, batch: int, interval: float
) -> None:
    step = decode_step(deployment, DecodeShape(batch, 4096))
    series = bandwidth(step, max(interval, step.seconds / 500))
    assert sum(series) * max(interval, step.seconds / 500) == pytest.approx(step.hbm_bytes)
    assert max(series) <= deployment.num_sockets * deployment.machine.hbm_bandwidth * (1 + 1e-9)


def test_looping_removes_gaps_between_layers() -> None:
    """Within the decoder: from the first layer's first byte to the last layer's last."""
    gaps = {}
    for execution in (Execution.FUSED, Execution.LOOPED):
        step = decode_step(Deployment(model("llama-3.1-8b"), sn40l(), 16, execution), DecodeShape(1, 4096))
        layers = [event for event in step.events if event.name == "layer"]
        series = bandwidth(step, 1e-6)[int(layers[0].start / 1e-6) + 1 : int(layers[-1].end / 1e-6)]
        gaps[execution] = sum(1 for idle, _ in itertools.groupby(rate == 0 for rate in series) if idle)
    assert gaps == {Execution.FUSED: 31, Execution.LOOPED: 0}


def test_chrome_trace_has_every_socket_and_all_bytes() -> None:
    step = decode_step(Deployment(model("deepseek-r1"), sn40l(), 16), DecodeShape(16, 8192))
    trace = chrome_trace(step)
    assert trace["otherData"] == {"simulated": True}
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == set(range(16))
    assert sum(event["args"].get("hbm_bytes", 0) for event in complete) == pytest.approx(step.hbm_bytes)
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(step.seconds * 1e6)
    for before, after in itertools.pairwise([event for event in complete if event["pid"] == 0]):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
