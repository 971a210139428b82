"""LiteLLM as a proxy before two servers, through the `openai` package: plain requests, and an agent's."""

import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import openai

PORT, SERVER, MODEL, AGENT_SERVER, AGENT_MODEL = sys.argv[1:]
KEY = f"sk-{secrets.token_hex(32)}"
HELLO: Any = [{"role": "user", "content": "What is the pet of Celia?"}]
CONFIG = f"""
model_list:
  - model_name: behind
    litellm_params: {{model: openai/{MODEL}, api_base: {SERVER}/v1, api_key: none}}
  - model_name: vectors
    litellm_params: {{model: openai/{MODEL}, api_base: {SERVER}/v1, api_key: none}}
    model_info: {{mode: embedding}}
  - model_name: agent
    litellm_params: {{model: openai/{AGENT_MODEL}, api_base: {AGENT_SERVER}/v1, api_key: none}}
general_settings: {{master_key: {KEY}}}
litellm_settings: {{telemetry: false, num_retries: 0}}
"""


SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
REPORT = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
TYPED = {"type": "json_schema", "json_schema": {"name": "Report", "schema": REPORT, "strict": True}}


def answer(client: openai.OpenAI, messages: list[Any], *, stream: bool, **options: Any) -> Any:
    """Return the message of an answer: whole, or put together from its chunks."""
    request: Any = {"model": "agent", "messages": messages, "tools": TOOLS, **options}
    if not stream:
        return client.chat.completions.create(**request).choices[0].message
    with client.chat.completions.stream(**request) as events:
        return events.get_final_completion().choices[0].message


def ask_as_agent(client: openai.OpenAI) -> None:
    """Go through whole turns: a call, its result, and an answer in words or by a schema."""
    for stream in (False, True):
        for options, wanted in (({}, "Oslo has 7 degrees."), ({"response_format": TYPED}, None)):
            question = "How is Oslo?" if wanted else "How is Oslo, in JSON form?"
            messages: list[Any] = [{"role": "user", "content": question}]
            message = answer(client, messages, stream=stream, **options)
            [call] = message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "Oslo"}
            messages.append(message.model_dump(exclude={"parsed"}))  # with all that LiteLLM adds to it
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "It is 7 degrees."})
            content = answer(client, messages, stream=stream, **options).content
            assert content == wanted or json.loads(content) == {"city": "Oslo", "degrees": 7}, content


def ask(client: openai.OpenAI) -> None:
    """Send one request of each kind that a proxy passes on."""
    whole = client.chat.completions.create(model="behind", messages=HELLO, max_tokens=12, temperature=0)
    assert whole.choices[0].message.content
    stream = client.chat.completions.create(
        model="behind",
        messages=HELLO,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert any(chunk.usage is not None for chunk in chunks)
    assert client.completions.create(model="behind", prompt="The bells", max_tokens=4).choices[0].text
    assert len(client.embeddings.create(model="vectors", input=["one", "two"]).data) == 2
    try:
        client.chat.completions.create(model="behind", messages=HELLO, top_logprobs=21, logprobs=True)
    except openai.BadRequestError as refused:
        why = str(refused)
    else:
        raise AssertionError("a bad value was not reported")
    assert "top_logprobs" in why, why


with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.yaml"
    config.write_text(CONFIG)
    command = [
        str(Path(sys.executable).with_name("litellm")),
        "--config",
        str(config),
        "--host",
        "127.0.0.1",
        "--port",
        PORT,
    ]
    with (
        (Path(folder) / "log").open("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as proxy,
    ):
        try:
            for _ in range(1200):
                assert proxy.poll() is None, "the proxy ended:\n" + (Path(folder) / "log").read_text()[-4000:]
                try:
                    if httpx.get(f"http://127.0.0.1:{PORT}/health/liveliness", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            own_client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key=KEY, max_retries=0)
            ask(own_client)
            ask_as_agent(own_client)
        finally:
            proxy.terminate()
print("ok")
