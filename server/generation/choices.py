"""What chats and completions share: numbered choices in an envelope, streamed as chunks."""

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from server.generation.events import ChoiceDelta, Kept, PromptLogprobs
from server.generation.tally import Tally
from server.protocol.chat import ChatTokenLogprob, TopLogprob
from server.protocol.generation import ChoicesRequest
from server.protocol.kept_tokens import KeptTokensField, kept_tokens
from server.protocol.prompt_logprobs import PromptLogprobs as PromptLogprobsField
from server.protocol.prompt_logprobs import prompt_logprobs
from server.text.logprobs import TokenLogprob, finite


@dataclass(frozen=True, slots=True)
class Envelope:
    """The members that every body and chunk of one answer has."""

    id: str
    model: str
    object_name: str
    chunk_name: str
    task_id: str  # unique, though clients may choose `id`
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(
        cls, id_prefix: str, model: str, object_name: str, chunk_name: str, request_id: str | None = None
    ) -> "Envelope":
        task_id = f"{id_prefix}{uuid.uuid4().hex}"
        answer_id = task_id if request_id is None else f"{id_prefix}{request_id}"
        return cls(answer_id, model, object_name, chunk_name, task_id)

    def body(self, choices: Iterable[Mapping[str, object]], usage: object) -> dict[str, object]:
        return self._members(self.object_name) | {"choices": list(choices), "usage": usage}

    def chunk(self, *choices: Mapping[str, object]) -> dict[str, object]:
        return self._members(self.chunk_name) | {"choices": list(choices)}

    def _members(self, name: str) -> dict[str, object]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


@dataclass(slots=True)
class PromptFields:
    """vLLM's fields about prompts, and `kept_tokens`, for the requests that want them."""

    request: ChoicesRequest
    prompts: tuple[tuple[int, ...], ...]
    tokens: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)  # by prompt
    kept: dict[int, Kept] = field(default_factory=dict)  # by prompt

    def add(self, prompt: int, event: PromptLogprobs | Kept) -> None:
        if isinstance(event, Kept):
            self.kept[prompt] = event
        else:
            self.tokens[prompt] = event.tokens

    def kept_tokens(self, prompt: int) -> KeptTokensField | None:
        """Return `kept_tokens`; None for a prompt that took no slot."""
        event = self.kept.get(prompt)
        if event is None:
            return None
        has_heads = self.request.return_kept_tokens == "heads"
        return kept_tokens(event.texts, event.kept, has_heads=has_heads)

    def logprobs(self, prompt: int) -> PromptLogprobsField | None:
        """Return `prompt_logprobs`, if requested. A prompt of one token has no other to report."""
        num_top = self.request.prompt_logprobs
        if num_top is None:
            return None
        tokens = self.tokens.get(prompt)
        return [None] if tokens is None else prompt_logprobs(tokens, num_top)

    def token_ids(self, prompt: int) -> list[int] | None:
        """Return `prompt_token_ids`, if requested."""
        return list(self.prompts[prompt]) if self.request.return_token_ids else None


@dataclass(slots=True)
class ChoiceEnd:
    """How a choice ended."""

    finish_reason: str
    stop_reason: str | int | None
    matched_stop: str | int | None

    @classmethod
    def of(cls, delta: ChoiceDelta) -> "ChoiceEnd | None":
        """Return a delta's end of its choice; None where the choice goes on."""
        if delta.final is None or delta.finish_reason is None:
            return None
        return cls(delta.finish_reason, delta.stop_reason, delta.matched_stop)


def usage_of_chunk(request: ChoicesRequest, tally: Tally, num_reasoning_tokens: int = 0) -> dict[str, object]:
    """Return the member `usage` of a chunk; chunks have none unless the request includes usage."""
    if not request.includes_usage:
        return {}
    return {"usage": tally.usage(num_reasoning_tokens) if request.includes_continuous_usage else None}


def named_tokens(request: ChoicesRequest, tokens: Iterable[TokenLogprob]) -> list[TokenLogprob]:
    """Return tokens named as requested: by their text or by their id."""
    return [token.by_id() if request.return_tokens_as_token_ids else token for token in tokens]


def chat_token_logprob(token: TokenLogprob) -> ChatTokenLogprob:
    """Return a token with its alternatives, as chats and responses report it."""
    return {
        **_top_logprob(token),
        "top_logprobs": [_top_logprob(other) for other in (*token.top, *token.named)],
    }


def _top_logprob(token: TokenLogprob) -> TopLogprob:
    return {"token": token.token, "logprob": finite(token.logprob), "bytes": list(token.bytes)}
