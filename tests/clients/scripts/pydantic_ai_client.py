"""pydantic-ai: tools with typed answers, as a tool of its own and by the model's schema, streamed and not."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="none")
asked: list[str] = []


class Report(BaseModel):
    city: str
    degrees: int


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return f"It is 7 degrees in {city}."


async def main() -> None:
    for make in (OpenAIChatModel, OpenAIResponsesModel):
        model = make("scripted", provider=provider)
        for output in (Report, NativeOutput(Report)):
            agent = Agent(model, output_type=output, tools=[get_weather], instructions="Report in JSON form.")
            whole = await agent.run("How is Oslo?")
            assert whole.output == Report(city="Oslo", degrees=7), whole
            async with agent.run_stream("How is Oslo?") as stream:
                assert await stream.get_output() == Report(city="Oslo", degrees=7)
        plain = Agent(model, tools=[get_weather], instructions="Report.")
        assert (await plain.run("How is Oslo?")).output == "Oslo has 7 degrees."


asyncio.run(main())
assert asked == ["Oslo"] * 10, asked
print("ok")
