"""OpenAI Agents SDK: tools and a typed answer in one run, over responses and chats, streamed and not."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(disabled=True)
client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
asked: list[str] = []


class Report(BaseModel):
    city: str
    degrees: int


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return f"It is 7 degrees in {city}."


async def main() -> None:
    for make in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="reporter",
            instructions="Report the weather in JSON form.",
            tools=[get_weather],
            output_type=Report,
            model=make(model="scripted", openai_client=client),
        )
        whole = await Runner.run(agent, "How is Oslo?")
        assert whole.final_output == Report(city="Oslo", degrees=7), whole
        streamed = Runner.run_streamed(agent, "How is Oslo?")
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds, kinds
        assert streamed.final_output == Report(city="Oslo", degrees=7), streamed
        plain = agent.clone(output_type=None, instructions="Report the weather.")
        assert (await Runner.run(plain, "How is Oslo?")).final_output == "Oslo has 7 degrees."


asyncio.run(main())
assert asked == ["Oslo"] * 6, asked
print("ok")
