"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Discriminator, Tag

from server.admission import served_model
from server.errors import invalid_value
from server.protocol.tokens import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeChatRequest, TokenizeTextRequest
from server.renderer import RenderError
from server.services import Services


def _kind(body: Any) -> str:
    return "chat" if isinstance(body, dict) and "messages" in body else "text"


TokenizeRequest = Annotated[Annotated[TokenizeTextRequest, Tag("text")] | Annotated[TokenizeChatRequest, Tag("chat")], Discriminator(_kind)]


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeAnswer:
        served_model(body.model, services.settings)
        spec = services.client.spec
        token_ids = await _encode(body)
        token_strs = [services.renderer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
        return {"count": len(token_ids), "max_model_len": spec.max_model_len, "tokens": list(token_ids), "token_strs": token_strs}

    async def _encode(body: TokenizeTextRequest | TokenizeChatRequest) -> tuple[int, ...]:
        try:
            if isinstance(body, TokenizeTextRequest):
                return await services.renderer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
            return await services.renderer.render_chat(
                [message.plain() for message in body.messages],
                add_generation_prompt=body.adds_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
            )
        except RenderError as error:
            raise invalid_value(str(error), "prompt" if isinstance(body, TokenizeTextRequest) else "messages") from error

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeAnswer:
        served_model(body.model, services.settings)
        services.client.spec  # noqa: B018
        try:
            return {"prompt": await services.renderer.decode(body.tokens)}
        except RenderError as error:
            raise invalid_value(str(error), "tokens") from error

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return dataclasses.asdict(services.renderer.info)

    return routes
