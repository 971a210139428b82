"""Routes of other servers that are not served, and what answers the same question here."""

from typing import Final, NoReturn

from fastapi import APIRouter

from server.http.errors import ApiError
from server.services import Services

_INSTEAD: Final = {
    "rerank": "compare embeddings of /v1/embeddings",
    "score": "compare embeddings of /v1/embeddings, or read the likelihoods of 'prompt_logprobs'",
    "pooling": "use /v1/embeddings",
    "classify": "use /v1/completions with 'structured_outputs': {'choice': [...]}",
}


def router(_: Services) -> APIRouter:
    routes = APIRouter()

    def add(name: str, instead: str) -> None:
        async def absent() -> NoReturn:
            message = f"This server does not rank, score or classify by itself: {instead}."
            raise ApiError(404, "unknown_url", message)

        for path in (f"/{name}", f"/v1/{name}", f"/v2/{name}"):
            routes.add_api_route(path, absent, methods=["POST"], include_in_schema=False, response_model=None)

    for name, instead in _INSTEAD.items():
        add(name, instead)
    return routes
