"""LangChain: answers, streams, tools, structured output, embeddings, and several at once."""

import asyncio
import sys
from typing import Literal

from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict

BASE_URL = sys.argv[1] + "/v1"
COMMON = {"base_url": BASE_URL, "api_key": "none", "model": "snapserve-demo"}


class Pet(BaseModel):
    """A pet. Its values are finite: a model that knows no JSON would not end a free text."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Luna", "Otto"]
    is_tame: bool


class Meal(BaseModel):
    """What a pet eats."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Luna", "Otto"]
    grams: Literal[10, 20]


@tool(args_schema=Meal)
def feed(name: str, grams: int) -> str:
    """Feed a pet."""
    return f"{name} ate {grams} g"


chat = ChatOpenAI(**COMMON, temperature=0, max_tokens=60)
turns = [SystemMessage("Be brief."), HumanMessage("What is the pet of Celia?")]
whole = chat.invoke(turns)
assert isinstance(whole.content, str)
assert whole.content
assert whole.response_metadata["finish_reason"] in ("stop", "length"), whole
assert whole.usage_metadata["input_tokens"] > 0

pieces = list(chat.stream(turns, stream_usage=True))
total = pieces[0]
for piece in pieces[1:]:
    total += piece
assert isinstance(total, AIMessageChunk)
assert total.content == whole.content, (total.content, whole.content)
assert total.usage_metadata == whole.usage_metadata, (total.usage_metadata, whole.usage_metadata)

limited = ChatOpenAI(**COMMON, temperature=0, max_tokens=400)
for method in ("json_schema", "function_calling"):
    pet = limited.with_structured_output(Pet, method=method).invoke("Tell me of Celia's pet.")
    assert isinstance(pet, Pet), pet

called = limited.bind_tools([feed], tool_choice="any", strict=True).invoke("Feed the cat.")
assert [(call["name"], set(call["args"])) for call in called.tool_calls] == [("feed", {"name", "grams"})], (
    called
)

answers = asyncio.run(
    chat.abatch([[HumanMessage(f"What is the pet of {name}?")] for name in ("Anna", "Celia", "Otto")])
)
assert all(answer.content for answer in answers)

assert OpenAI(**COMMON, max_tokens=5).invoke("The bells stayed")

vectors = OpenAIEmbeddings(**COMMON, check_embedding_ctx_length=False).embed_documents(
    ["one text", "another", "one text"]
)
assert len({len(vector) for vector in vectors}) == 1
assert max(abs(a - b) for a, b in zip(vectors[0], vectors[2], strict=True)) < 1e-5
print("ok")
