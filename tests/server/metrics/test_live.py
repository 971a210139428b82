"""What the live view draws of a slot, against the slot's arithmetic, and what it sends."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.fake import slot_pool
from cache.policy import CachePolicy, full, snapstream, streaming_llm
from cache.scorer import WindowScorer
from scheduler.stats import SlotUse
from server.metrics.live import drawing
from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve, spec
from tests.server.serving import settings as server_settings

POLICIES = (
    full(40),
    streaming_llm(2, 6),
    snapstream(2, 6, 4, WindowScorer(observation_window=2)),
    snapstream(2, 8, 4, WindowScorer(observation_window=2), lend_kept=True, lend_ring=True),
)


def drawn(policy: CachePolicy, num_prompt: int, num_computed: int, *, is_decoding: bool) -> dict[str, Any]:
    use = SlotUse(0, 3, "secret", 0, is_decoding, num_prompt, num_prompt, num_computed, 1, 0)
    return drawing(use, slot_pool(4, policy, 64))


def entries_of(slot: dict[str, Any]) -> set[int]:
    """Return the entries that the page paints."""
    start, size, num_live, head = slot["ring"]
    ring = {start + (head - start - age) % size for age in range(num_live)}
    kept_start, num_kept = slot["kept"]
    return set(range(slot["sinks"])) | ring | set(range(kept_start, kept_start + num_kept))


@given(st.sampled_from(POLICIES), st.integers(1, 30), st.integers(0, 30))
@settings(deadline=None)
def test_a_decoding_slot_is_drawn_as_its_entries_lie(
    policy: CachePolicy, num_prompt: int, num_output: int
) -> None:
    if policy.name == "full" and num_prompt + num_output > policy.layout.capacity:
        return
    num_tokens = num_prompt + num_output
    slot, place = drawn(policy, num_prompt, num_tokens, is_decoding=True), policy.place(num_prompt)
    ring = {
        place.layout.num_sink + offset
        for offset in range(place.ring_size)
        if place.ring_index(offset, num_tokens) is not None
    }
    kept = set(range(place.kept_start, policy.layout.capacity))
    assert entries_of(slot) == set(range(min(num_tokens, place.layout.num_sink))) | ring | kept
    assert len(entries_of(slot)) == policy.num_live(num_prompt, num_tokens)
    if ring:
        assert slot["ring"][3] == place.entry(num_tokens - 1)
    lent_start, num_lent = slot["lent_to_kept"]
    # Decode has written to the lent entries before these.
    assert num_lent == max(place.num_lent - num_output, 0)
    if num_lent:
        assert lent_start == place.entry(num_prompt + num_output)


@given(st.sampled_from(POLICIES), st.integers(1, 30), st.data())
@settings(deadline=None)
def test_a_prompt_is_drawn_where_it_is_read_to(
    policy: CachePolicy, num_prompt: int, data: st.DataObject
) -> None:
    num_read = data.draw(st.integers(0, num_prompt))
    slot, place = drawn(policy, num_prompt, num_read, is_decoding=False), policy.place(num_prompt)
    is_in_slot = num_prompt <= policy.max_direct_tokens
    assert entries_of(slot) == {place.direct_entry(index) for index in range(num_read if is_in_slot else 0)}
    assert (slot["prompt"], slot["computed"]) == (num_prompt, num_read)


def test_a_drawing_names_no_request() -> None:
    assert "secret" not in json.dumps(drawn(POLICIES[0], 3, 4, is_decoding=True))


def events(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


def until(stream: Iterator[Any], kind: str) -> Any:
    return next(event for event in stream if event["type"] == kind)


def test_the_stream_follows_the_slots(renderer: Renderer) -> None:
    pools = (slot_pool(2, full(1024), 1024), slot_pool(1, POLICIES[2], 1024, "small"))
    with (
        serve(renderer, backend_spec=spec(pools=pools), is_open=False) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
        http.stream("GET", "/slots/events") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        described = until(stream, "pools")["pools"]
        assert [(pool["name"], pool["num_slots"], pool["capacity"]) for pool in described] == [
            ("full", 2, 1024),
            ("small", 1, 12),
        ]
        assert until(stream, "points")["points"] == []
        assert until(stream, "sample")["slots"] == []
        with asked(server, pool="small", max_tokens=40, ignore_eos=True, prompt=[7] * 9):
            server.gate.let(3)
            slot = next(event["slots"][0] for event in stream if event.get("slots"))
            assert (slot["pool"], slot["slot"], slot["prompt"]) == (1, 0, 9)
            server.gate.open()
            point = next(point for point in points(stream) if point["tokens_per_second"])
        assert point["ttft"] > 0
        assert set(point) == {
            *("tokens_per_second", "prompt_tokens_per_second", "ttft", "time_per_token"),
            *("rejections", "running", "waiting"),
        }
        assert next(event for event in stream if event.get("slots") == [])["running"] == 0


def test_viewers_share_one_sampler_and_the_engine_lists_slots_only_for_them(renderer: Renderer) -> None:
    with (
        serve(renderer, is_open=False) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
        asked(server, max_tokens=200, ignore_eos=True, prompt=[7, 8]),
    ):
        server.gate.let(2)
        server.observed.wait_until(lambda: server.observed.last_step is not None)
        with (
            http.stream("GET", "/slots/events") as first,
            http.stream("GET", "/slots/events") as second,
        ):
            streams = events(first), events(second)
            server.gate.let(2)
            for stream in streams:
                assert next(event["slots"] for event in stream if event.get("slots"))
            assert until(streams[0], "points")["points"]
            assert server.observed.last_step is not None
            assert server.observed.last_step.stats.slots
            # A viewer that leaves takes nothing from the other one.
            second.close()
            assert until(streams[0], "sample")["slots"]
        server.observed.wait_until(lambda: 200 in server.observed.statuses)
        for _ in range(100):
            last = server.observed.last_step
            server.gate.let(1)
            server.observed.wait_for_step_after(last)
            if not server.observed.last_step.stats.slots:
                break
        assert server.observed.last_step.stats.num_slots_in_use == 1
        assert server.observed.last_step.stats.slots == ()
        # Who comes later sees the curves of before.
        with http.stream("GET", "/slots/events") as third:
            assert until(events(third), "points")["points"]
        server.gate.open()


def test_the_stream_needs_a_key_and_ends_with_the_page(renderer: Renderer) -> None:
    with serve(renderer, server_settings(api_keys=("key",))) as server:
        assert httpx.get(f"{server.url}/slots/events").status_code == 401
    with serve(renderer, server_settings(page=False)) as server:
        answer = httpx.get(f"{server.url}/slots/events")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "page_disabled")


def points(stream: Iterator[Any]) -> Iterator[Any]:
    for event in stream:
        if event["type"] == "points":
            yield from event["points"]


class asked:  # noqa: N801  # a context manager, read as a verb
    """A completion that is requested within the block, and answered at its end."""

    def __init__(self, server: RunningServer, **body: object) -> None:
        self._thread = threading.Thread(target=self._ask, args=(server.url, body))

    def _ask(self, url: str, body: object) -> None:
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=60)
