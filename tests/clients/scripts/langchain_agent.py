"""LangChain's agents: turns with a tool, typed answers, and streams."""

import sys

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

asked: list[str] = []


class Report(BaseModel):
    """A report of the weather."""

    city: str
    degrees: int


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return f"It is 7 degrees in {city}."


TURN = {"messages": [{"role": "user", "content": "How is Oslo?"}]}
for use_responses in (False, True):
    model = ChatOpenAI(
        base_url=sys.argv[1] + "/v1", api_key="none", model="scripted", use_responses_api=use_responses
    )
    plain = create_agent(model, tools=[get_weather], system_prompt="Report.")
    assert plain.invoke(TURN)["messages"][-1].text == "Oslo has 7 degrees."
    text = "".join(
        message.text
        for message, place in plain.stream(TURN, stream_mode="messages")
        if place["langgraph_node"] == "model"
    )
    assert text == "Oslo has 7 degrees.", text
    for strategy in (ProviderStrategy, ToolStrategy):
        agent = create_agent(
            model, tools=[get_weather], response_format=strategy(Report), system_prompt="Report in JSON form."
        )
        answer = agent.invoke(TURN)
        assert answer["structured_response"] == Report(city="Oslo", degrees=7), answer
assert asked == ["Oslo"] * 8, asked
print("ok")
