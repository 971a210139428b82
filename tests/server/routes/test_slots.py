"""`GET /slots`: off by default, and equal to the state of each step."""

import threading
from typing import Any

import httpx

from scheduler.config import SchedulerConfig
from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve, settings, spec


def test_off_by_default(http: httpx.Client) -> None:
    answer = http.get("/slots")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "slots_disabled")


def test_each_slot_state_is_reported(renderer: Renderer) -> None:
    shown, config = settings(enable_slots=True), SchedulerConfig(reports_slots=True, max_decode_steps=1)
    with (
        serve(renderer, shown, spec(num_slots=2), config=config, is_open=False) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        assert [slot["state"] for slot in http.get("/slots").json()] == ["free", "free"]
        asking = threading.Thread(target=ask, args=(server.url,))
        asking.start()
        server.gate.let(3)  # the prompt, and two tokens more
        server.observed.wait_until(lambda: 3 in num_output_tokens(server))
        [busy] = [slot for slot in http.get("/slots").json() if slot["is_processing"]]
        assert (busy["state"], busy["num_prompt_tokens"], busy["num_output_tokens"]) == ("decode", 3, 3)
        assert (
            busy["num_computed_tokens"] == busy["num_live_entries"] == 5
        )  # the newest token is not written yet
        assert busy["n_ctx"] == 1024
        server.gate.open()
        asking.join(timeout=30)
        assert not any(slot["is_processing"] for slot in http.get("/slots").json())


def num_output_tokens(server: RunningServer) -> list[int]:
    step = server.observed.last_step
    return [] if step is None else [use.num_output_tokens for use in step.stats.slots]


def ask(url: str) -> Any:
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30).raise_for_status().json()
