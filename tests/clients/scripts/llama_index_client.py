"""LlamaIndex: an agent with a tool, its stream, and typed answers."""

import asyncio
import sys

from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

asked: list[str] = []
model = OpenAILike(
    model="scripted",
    api_base=sys.argv[1] + "/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
)


class Report(BaseModel):
    """A report of the weather."""

    city: str
    degrees: int


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return f"It is 7 degrees in {city}."


async def main() -> None:
    agent = FunctionAgent(tools=[get_weather], llm=model, system_prompt="Report.")
    handler = agent.run("How is Oslo?")
    text = "".join([event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)])
    assert str(await handler) == "Oslo has 7 degrees.", await handler
    assert text.endswith("Oslo has 7 degrees."), text
    typed = await model.astructured_predict(
        Report, PromptTemplate("It is 7 degrees. Report Oslo in JSON form.")
    )
    assert typed == Report(city="Oslo", degrees=7), typed


asyncio.run(main())
assert asked == ["Oslo"], asked
print("ok")
