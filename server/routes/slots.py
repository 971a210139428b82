"""`GET /slots`: what each slot does, for whoever runs the server. Off unless asked for, since all keys would see each other's work."""

import hashlib

from fastapi import APIRouter
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from backends.interface import SlotPoolSpec
from scheduler.stats import SlotUse
from server.http.errors import ApiError
from server.services import Services


class Slot(TypedDict):
    """A slot. Its sequence is named by a hash of the request's id and the choice, which says no more than that it is the same one."""

    id: int
    pool: str
    policy: str
    capacity: int
    n_ctx: int
    is_processing: bool
    state: str
    task: str | None
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_live_entries: int


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.get("/slots")
    async def slots() -> list[Slot]:
        if not services.settings.slots_are_shown:
            raise ApiError(
                404,
                "slots_disabled",
                "This server does not tell of its slots: it was started without --enable-slots.",
            )
        spec = services.client.spec
        held = {(use.pool, use.slot): use for use in services.client.slots()}
        return [
            _slot(number, pool, spec.max_model_len, held.get((place, number)))
            for place, pool in enumerate(spec.pools)
            for number in range(pool.num_slots)
        ]

    return routes


def _slot(number: int, pool: SlotPoolSpec, max_model_len: int, use: SlotUse | None) -> Slot:
    return {
        "id": number,
        "pool": pool.name,
        "policy": pool.policy.name.value,
        "capacity": pool.policy.layout.capacity,
        "n_ctx": max_model_len,
        "is_processing": use is not None,
        "state": "free" if use is None else "decode" if use.is_decoding else "prefill",
        "task": None
        if use is None
        else hashlib.sha256(f"{use.request_id}/{use.choice}".encode()).hexdigest()[:16],
        "num_prompt_tokens": use.num_prompt_tokens if use else 0,
        "num_computed_tokens": use.num_computed_tokens if use else 0,
        "num_output_tokens": use.num_output_tokens if use else 0,
        "num_live_entries": use.num_live if use else 0,
    }
