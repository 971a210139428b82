"""The mark of simulated answers."""

import json

import httpx
from starlette.types import Receive, Scope, Send

from server.http.simulated import SimulatedMark
from server.http.streams import LineStream


async def test_body_without_members_or_in_pieces_is_not_changed() -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        for piece, more in ((b"{", True), (b"}", False)):
            await send({"type": "http.response.body", "body": piece, "more_body": more})

    transport = httpx.ASGITransport(SimulatedMark(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://simulated") as client:
        answer = await client.get("/")
    assert (answer.json(), answer.headers["x-simulated"]) == ({}, "true")


async def test_every_line_of_a_stream_is_marked() -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        stream = LineStream(send)
        await stream.start()
        for number in range(2):
            await stream.data({"number": number})
        await stream.close()

    transport = httpx.ASGITransport(SimulatedMark(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://simulated") as client:
        answer = await client.get("/")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines == [{"simulated": True, "number": 0}, {"simulated": True, "number": 1}]
