"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`.

Each reserves a ticket for 0 sequences: it takes no place in the queue, but fails until the tokenizer is
loaded.
"""

import dataclasses
from typing import Any

from fastapi import APIRouter

from server.generation.admission import served_model
from server.generation.turn import TurnRequest, render_turn
from server.http.errors import invalid_value
from server.protocol.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizeTextRequest,
)
from server.services import Services
from server.text.renderer import RenderError


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    client = services.client
    renderer = services.renderer

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeAnswer:
        served_model(body.model, services.settings)
        with client.reserve(0):
            token_ids = await _encode(body, services)
            token_strs = None
            if body.return_token_strs:
                token_strs = [renderer.token_text(token_id) for token_id in token_ids]
            max_model_len = client.spec.max_model_len
        return {
            "count": len(token_ids),
            "max_model_len": max_model_len,
            "tokens": list(token_ids),
            "token_strs": token_strs,
        }

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeAnswer:
        served_model(body.model, services.settings)
        with client.reserve(0):
            try:
                return {"prompt": await renderer.decode(body.tokens)}
            except RenderError as error:
                raise invalid_value(str(error), "tokens") from error

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        with client.reserve(0):
            return dataclasses.asdict(renderer.info)

    return routes


async def _encode(body: TokenizeRequest, services: Services) -> tuple[int, ...]:
    try:
        if isinstance(body, TokenizeTextRequest):
            return await services.renderer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        turn = TurnRequest(
            messages=[message.plain() for message in body.messages],
            tools=body.tool_use,
            structure=None,
            template_options=body.template_options,
            adds_generation_prompt=body.adds_generation_prompt,
            continues_final_message=bool(body.continue_final_message),
        )
        prompt = (await render_turn(turn, services.renderer, services.settings)).prompt
        return await services.renderer.with_special_tokens(prompt) if body.add_special_tokens else prompt
    except RenderError as error:
        param = "prompt" if isinstance(body, TokenizeTextRequest) else "messages"
        raise invalid_value(str(error), param) from error
