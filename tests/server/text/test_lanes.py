"""Turns between owners within a lane, and its end."""

import threading
from collections.abc import Callable

import pytest

from server.text.lanes import Lane


def test_owners_take_turns() -> None:
    gate = threading.Event()
    order: list[str] = []

    def job(name: str) -> Callable[[list[str]], None]:
        def work(state: list[str]) -> None:
            gate.wait(10)
            state.append(name)

        return work

    lane = Lane("lane", lambda: order)
    futures = [lane.submit("greedy", job(f"greedy {number}")) for number in range(5)]
    futures += [lane.submit("modest", job("modest"))]
    assert futures[2].cancel()
    gate.set()
    futures[-1].result(10)
    futures[4].result(10)
    lane.close()
    assert order.index("modest") <= 2
    assert [name for name in order if name != "modest"] == ["greedy 0", "greedy 1", "greedy 3", "greedy 4"]


def test_errors_go_to_the_future_and_the_lane_goes_on() -> None:
    def fail(_: int) -> None:
        raise ValueError("wrong")

    lane = Lane("lane", lambda: 5)
    with pytest.raises(ValueError, match="wrong"):
        lane.submit("", fail).result(10)
    assert lane.submit("", lambda state: state + 1).result(10) == 6
    assert lane.is_idle
    lane.close()


def test_the_end_cancels_what_waits() -> None:
    gate, started = threading.Event(), threading.Event()

    def hold(_: None) -> bool:
        started.set()
        return gate.wait(10)

    lane = Lane("lane", lambda: None)
    running = lane.submit("", hold)
    waiting = lane.submit("", lambda _: None)
    assert started.wait(10)
    threading.Timer(0.05, gate.set).start()
    lane.close()
    assert running.result(0)
    assert waiting.cancelled()
