"""Stored `/v1/responses`: conversations, operations on a response, limits, background."""

import httpx
from openai.types.responses import Response, ResponseItemList

from server.options.settings import RateLimit, StorageLimits
from server.text.renderer import Renderer
from tests.server.responses.requests import HELLO, PATH, ask, stream, text_of
from tests.server.serving import MODEL, serve, settings, spec


def test_a_conversation_continues(http: httpx.Client) -> None:
    first = ask(http, temperature=0)
    values = [
        {"role": "user", "content": HELLO["input"]},
        *first["output"],
        {"role": "user", "content": "And now?"},
    ]
    second = ask(
        http, temperature=0, input="And now?", previous_response_id=first["id"], instructions="Be brief."
    )
    assert text_of(second) == text_of(ask(http, temperature=0, input=values, instructions="Be brief."))
    assert second["previous_response_id"] == first["id"]
    assert (
        ask(http, input="And now?", previous_response_id=first["id"])["usage"]["input_tokens"]
        < second["usage"]["input_tokens"]
    )


def test_items_of_a_conversation_are_listed_in_pages(http: httpx.Client) -> None:
    first = ask(http)
    second = ask(
        http,
        input=[{"role": "user", "content": "And"}, {"role": "user", "content": "now?"}],
        previous_response_id=first["id"],
    )
    path = f"{PATH}/{second['id']}/input_items"
    listed = http.get(path, params={"order": "asc"})
    ResponseItemList.model_validate_json(listed.content, strict=True)
    items = listed.json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user", "user"]
    assert items[1] == first["output"][0]
    assert http.get(path).json()["data"] == items[::-1]
    page = http.get(path, params={"order": "asc", "limit": 2, "after": items[0]["id"]}).json()
    assert (page["data"], page["first_id"], page["last_id"], page["has_more"]) == (
        items[1:3],
        items[1]["id"],
        items[2]["id"],
        True,
    )
    assert http.get(path, params={"after": "msg_x"}).status_code == 404
    refused = http.get(path, params={"limit": 0})
    assert (refused.status_code, refused.json()["error"]["param"], refused.json()["error"]["code"]) == (
        400,
        "limit",
        "invalid_value",
    )
    reference = {"type": "item_reference", "id": items[1]["id"]}
    ask(http, input=[{"role": "user", "content": "x"}, reference])
    assert http.post(PATH, json=HELLO | {"input": [{"id": "msg_x_0"}]}).status_code == 404


def test_a_stored_response_can_be_fetched_and_deleted(http: httpx.Client) -> None:
    response = ask(http, metadata={"a": "b"})
    path = f"{PATH}/{response['id']}"
    assert http.get(path).json() == response
    assert http.get(path, params={"stream": True}).status_code == 400
    assert http.post(f"{path}/cancel").status_code == 400
    assert http.delete(path).json() == {"id": response["id"], "object": "response", "deleted": True}
    for answer in (
        http.get(path),
        http.delete(path),
        http.post(f"{path}/cancel"),
        http.get(f"{path}/input_items"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
    refused = http.post(PATH, json=HELLO | {"previous_response_id": response["id"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    assert http.get(path, params={"stream": True}).status_code == 404
    streamed = stream(http)[-1]["response"]
    assert http.get(f"{PATH}/{streamed['id']}").json() == streamed


def test_a_response_without_store_is_not_stored(http: httpx.Client) -> None:
    response = ask(http, store=False)
    assert response["store"] is False
    assert http.get(f"{PATH}/{response['id']}").status_code == 404


def test_storage_is_limited_and_private(renderer: Renderer) -> None:
    limits = StorageLimits(max_responses=2)
    with serve(renderer, settings(storage=limits, api_keys=("one", "two"))) as server:
        one, two = (
            httpx.Client(base_url=server.url, timeout=30, headers={"Authorization": f"Bearer {key}"})
            for key in ("one", "two")
        )
        with one, two:
            first, second = ask(one), ask(two)
            assert one.get(f"{PATH}/{first['id']}").status_code == 200
            assert two.get(f"{PATH}/{first['id']}").status_code == 404
            assert two.delete(f"{PATH}/{first['id']}").status_code == 404
            assert two.post(PATH, json=HELLO | {"previous_response_id": first["id"]}).status_code == 400
            stolen = [{"type": "item_reference", "id": first["output"][0]["id"]}]
            assert two.post(PATH, json=HELLO | {"input": stolen}).status_code == 404
            third = ask(one)
            assert one.get(f"{PATH}/{first['id']}").status_code == 404
            assert one.get(f"{PATH}/{third['id']}").status_code == 200
            assert two.get(f"{PATH}/{second['id']}").status_code == 200


def test_a_response_too_large_to_store_is_reported(renderer: Renderer) -> None:
    with (
        serve(renderer, settings(storage=StorageLimits(max_bytes=3000))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        assert ask(http)["store"] is True
        large = {str(number): "x" * 500 for number in range(6)}
        for response in (ask(http, metadata=large), stream(http, metadata=large)[-1]["response"]):
            assert response["store"] is False
            assert http.get(f"{PATH}/{response['id']}").status_code == 404
        values = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines())
        labels = f'{{engine="0",model_name="{MODEL}"}}'
        assert float(values[f"snapserve:stored_responses{labels}"]) == 1
        assert 500 < float(values[f"snapserve:stored_response_bytes{labels}"]) <= 3000


def test_a_server_may_keep_nothing(renderer: Renderer) -> None:
    with (
        serve(renderer, settings(storage=StorageLimits(max_responses=0))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        assert ask(http)["store"] is False
        for param in ("store", "background"):
            error = http.post(PATH, json=HELLO | {param: True}).json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", param)


def test_the_background(renderer: Renderer) -> None:
    with (
        serve(renderer, backend_spec=spec(num_slots=1, max_decode_steps=1), is_open=False) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        queued = ask(http, background=True, max_output_tokens=500)
        assert (queued["status"], queued["output"]) == ("queued", [])
        path = f"{PATH}/{queued['id']}"
        assert http.post(PATH, json=HELLO | {"previous_response_id": queued["id"]}).status_code == 400
        server.gate.let(3)
        server.observed.wait_until(lambda: server.observed.last_step is not None)
        cancelled = http.post(f"{path}/cancel").json()
        assert (cancelled["status"], http.get(path).json()) == ("cancelled", cancelled)
        assert http.post(f"{path}/cancel").json() == cancelled
        deleted = ask(http, background=True)["id"]
        assert http.delete(f"{PATH}/{deleted}").status_code == 200
        assert http.get(f"{PATH}/{deleted}").status_code == 404
        server.gate.open()
        server.observed.wait_until(lambda: len(server.observed.finals) == 2)
        other = ask(http, background=True)
        server.observed.wait_until(lambda: len(server.observed.finals) == 3)
        while http.get(f"{PATH}/{other['id']}").json()["status"] in ("queued", "in_progress"):
            pass
        done = http.get(f"{PATH}/{other['id']}").json()
        assert (done["status"], done["usage"]["output_tokens"]) == ("incomplete", 8)
        assert http.post(f"{PATH}/{other['id']}/cancel").json() == done
        Response.model_validate(done)
        refused = http.post(PATH, json=HELLO | {"background": True, "max_output_tokens": 5000})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        assert ask(http)["status"] == "incomplete"  # no place was lost


def test_tokens_of_the_background_count(renderer: Renderer) -> None:
    limited = settings(rate_limit=RateLimit(tokens=100))
    with serve(renderer, limited) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        ask(http, background=True, max_output_tokens=80)
        server.observed.wait_until(lambda: len(server.observed.finals) == 1)
        assert http.post(PATH, json=HELLO | {"max_output_tokens": 80}).status_code == 429
