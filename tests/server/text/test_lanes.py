"""Turns between owners within a lane, and its end."""

import os
import sys
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

    lane = Lane("lane", lambda _: order)
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

    lane = Lane("lane", lambda _: 5)
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

    lane = Lane("lane", lambda _: None)
    running = lane.submit("", hold)
    waiting = lane.submit("", lambda _: None)
    assert started.wait(10)
    threading.Timer(0.05, gate.set).start()
    lane.close()
    assert running.result(0)
    assert waiting.cancelled()


def test_of_two_workers_no_owner_has_both() -> None:
    gate, started = threading.Event(), threading.Event()
    states: list[int] = []

    def make_state(number: int) -> int:
        states.append(number)
        return number

    lane = Lane("lane", make_state, num_workers=2)

    def wait(_: int) -> bool:
        started.set()
        return gate.wait(30)

    greedy = [lane.submit("greedy", wait) for _ in range(3)]
    assert started.wait(30)
    assert lane.submit("modest", lambda number: number).result(30) == 1
    assert not any(future.done() for future in greedy)
    assert [future.running() for future in greedy] == [True, False, False]
    was_idle = lane.is_idle
    gate.set()
    assert all(future.result(30) for future in greedy)
    assert (was_idle, lane.is_idle) == (False, True)
    lane.close()
    assert states[0] == 0
    assert len(set(states)) == len(states) <= 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_a_lane_may_have_a_lower_priority() -> None:
    def priority(_: None) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    lane = Lane("lane", lambda _: None, niceness=3)
    own = priority(None)
    assert lane.submit("", priority).result(10) == min(19, own + 3)
    assert priority(None) == own
    lane.close()
