"""`GET /slots`: the state of each slot, for operators.

Off by default, since every API key can see the work of all keys.
"""

import hashlib

from fastapi import APIRouter
from typing_extensions import TypedDict  # pydantic supports typing's only from Python 3.12 on

from backends.interface import SlotPoolSpec
from scheduler.stats import SlotUse
from server.http.errors import ApiError
from server.services import Services


class Slot(TypedDict):
    """One slot. `task` is a hash of the sequence's request id and choice.

    It identifies a sequence over several requests to this route, but does not reveal the request's id.
    """

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
        if not services.settings.api.enable_slots:
            raise ApiError(
                404,
                "slots_disabled",
                "This route is disabled: the server was started without --enable-slots.",
            )
        spec = services.client.spec
        stats = services.client.stats()
        uses = {(use.pool, use.slot): use for use in (stats.slots if stats else ())}
        return [
            _slot(slot_index, pool, spec.max_model_len, uses.get((pool_index, slot_index)))
            for pool_index, pool in enumerate(spec.pools)
            for slot_index in range(pool.num_slots)
        ]

    return routes


def _slot(slot_index: int, pool: SlotPoolSpec, max_model_len: int, use: SlotUse | None) -> Slot:
    if use is None:
        state = "free"
        task = None
    else:
        state = "decode" if use.is_decoding else "prefill"
        task = hashlib.sha256(f"{use.request_id}/{use.choice}".encode()).hexdigest()[:16]
    return {
        "id": slot_index,
        "pool": pool.name,
        "policy": pool.policy.name.value,
        "capacity": pool.policy.capacity,
        "n_ctx": max_model_len,
        "is_processing": use is not None,
        "state": state,
        "task": task,
        "num_prompt_tokens": use.num_prompt_tokens if use else 0,
        "num_computed_tokens": use.num_computed_tokens if use else 0,
        "num_output_tokens": use.num_output_tokens if use else 0,
        "num_live_entries": use.num_live if use else 0,
    }
