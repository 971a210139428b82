"""LiteLLM as a library: it understands answers, streams, embeddings and errors."""

import asyncio
import sys

import litellm

COMMON = {"model": "openai/snapserve-demo", "api_base": sys.argv[1] + "/v1", "api_key": "none"}
HELLO = [{"role": "user", "content": "What is the pet of Celia?"}]

whole = litellm.completion(**COMMON, messages=HELLO, max_tokens=12, temperature=0)
assert whole.choices[0].message.content
assert whole.usage.completion_tokens <= 12

chunks = list(litellm.completion(**COMMON, messages=HELLO, max_tokens=12, temperature=0, stream=True))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content, (text, whole)


async def several() -> None:
    answers = await asyncio.gather(
        *(litellm.acompletion(**COMMON, messages=HELLO, max_tokens=4) for _ in range(5))
    )
    assert all(answer.choices for answer in answers)


asyncio.run(several())

assert litellm.text_completion(**COMMON, prompt="The bells", max_tokens=4).choices[0].text
embedded = litellm.embedding(**(COMMON | {"model": "openai/snapserve-demo"}), input=["one", "two"])
assert len(embedded.data) == 2

try:
    litellm.completion(**COMMON, messages=[{"role": "user", "content": "word " * 20000}], max_tokens=5)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt that is too long was not reported")

try:
    litellm.completion(**(COMMON | {"model": "openai/another-model"}), messages=HELLO)
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was not reported")

try:
    litellm.completion(**COMMON, messages=HELLO, temperature=9)
except litellm.BadRequestError:
    pass
else:
    raise AssertionError("a bad value was not reported")
print("ok")
