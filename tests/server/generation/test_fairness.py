"""One key's crowd does not keep another key waiting, over HTTP."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from scheduler.config import SchedulerConfig
from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve, settings, spec

REQUEST: dict[str, Any] = {"prompt": "Anna keeps", "ignore_eos": True, "temperature": 0}
LONG = 900  # tokens


def post(server: RunningServer, max_tokens: int, headers: dict[str, str] | None = None, **body: Any) -> int:
    content = REQUEST | {"max_tokens": max_tokens} | body
    return httpx.post(
        f"{server.url}/v1/completions", json=content, headers=headers or {}, timeout=60
    ).status_code


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def wait_for_queue(server: RunningServer, num_waiting: int) -> None:
    """Wait until `num_waiting` more requests have a ticket, and step until the engine has them."""
    server.observed.wait_until(lambda: server.observed.num_reserved == num_waiting + 1)
    for _ in range(LONG - 1):
        last = server.observed.last_step
        if last is not None and last.stats.num_waiting == num_waiting:
            return
        server.gate.let(1)
        server.observed.wait_for_step_after(last)
    raise AssertionError(f"{num_waiting} did not wait: {server.observed.last_step}")


@pytest.mark.parametrize("keys", [("heavy", "light"), ()])
def test_a_light_tenant_is_admitted_before_a_heavy_ones_queue(
    renderer: Renderer, keys: tuple[str, ...]
) -> None:
    """Tenants are keys, or users where there are no keys."""

    def ask(max_tokens: int, name: str) -> int:
        return post(server, max_tokens, bearer(name)) if keys else post(server, max_tokens, user=name)

    with (
        serve(renderer, settings(api_keys=keys), spec(num_slots=1), is_open=False) as server,
        ThreadPoolExecutor(5) as pool,
    ):
        heavy = [pool.submit(ask, LONG, "heavy") for _ in range(4)]
        wait_for_queue(server, 3)
        light = pool.submit(ask, 3, "light")
        wait_for_queue(server, 4)
        server.gate.open()
        assert {answer.result() for answer in (*heavy, light)} == {200}
    assert [final.num_output_tokens for final in server.observed.finals].index(3) == 1


def test_one_key_cannot_fill_the_queue(renderer: Renderer) -> None:
    config = SchedulerConfig(max_num_waiting=4, max_num_waiting_per_tenant=2)
    with (
        serve(
            renderer, settings(api_keys=("heavy", "light")), spec(num_slots=1), config=config, is_open=False
        ) as server,
        ThreadPoolExecutor(5) as pool,
    ):
        heavy = [pool.submit(post, server, 2, bearer("heavy")) for _ in range(3)]
        server.observed.wait_until(lambda: server.observed.num_reserved == 3)
        assert post(server, 2, bearer("heavy")) == 429
        light = [pool.submit(post, server, 2, bearer("light")) for _ in range(2)]
        server.observed.wait_until(lambda: server.observed.num_reserved == 5)
        server.gate.open()
        assert {answer.result() for answer in (*heavy, *light)} == {200}
