"""One server without its HTTP server, from its start to its end."""

import json
from pathlib import Path

import httpx

from commands.cli import make_parser
from server.instance import Instance
from server.metrics.metrics import Metrics
from server.options.serve import read_config
from server.options.settings import StorageLimits
from server.state.sqlite_state import SqliteState


async def test_a_background_response_that_ends_with_the_server_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    flags = ["serve", "--backend", "fake", "--model", "demo", "--state-url", f"sqlite://{path}"]
    instance = Instance(read_config(make_parser("serve").parse_args(flags), {}), None)
    instance.start()
    assert (await instance.wait_loaded()).is_ready
    transport = httpx.ASGITransport(instance.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        body = {"model": "snapserve-demo", "input": "Hello", "background": True, "max_output_tokens": 3000}
        made = (await http.post("/v1/responses", json=body | {"ignore_eos": True})).json()
    await instance.close()
    state = SqliteState(path, StorageLimits(), Metrics("demo"))
    stored = await state.responses.get("", made["id"])
    assert stored is not None
    response = json.loads(stored.body)
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    await state.close()
