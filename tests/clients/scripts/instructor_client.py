"""instructor: objects of a pydantic class, by tools and by schema."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    """A reply. Its values are finite: a model that knows no JSON would not end a free text."""

    model_config = ConfigDict(extra="forbid")
    is_known: bool
    level: Literal["low", "high"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=sys.argv[1] + "/v1", api_key="none"), mode=mode)
    reply = client.chat.completions.create(
        model="snapserve-demo",
        response_model=Reply,
        messages=[{"role": "user", "content": "Is it known?"}],
        temperature=0,
        max_tokens=400,
        max_retries=0,
    )
    assert isinstance(reply, Reply), reply
print("ok")
