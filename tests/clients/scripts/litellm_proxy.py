"""LiteLLM as a proxy in front of the server, used through the `openai` package."""

import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import openai

SERVER, PORT = sys.argv[1], sys.argv[2]
KEY = f"sk-{secrets.token_hex(32)}"
HELLO: Any = [{"role": "user", "content": "What is the pet of Celia?"}]
CONFIG = f"""
model_list:
  - model_name: behind
    litellm_params: {{model: openai/snapserve-demo, api_base: {SERVER}/v1, api_key: none}}
  - model_name: vectors
    litellm_params: {{model: openai/snapserve-demo, api_base: {SERVER}/v1, api_key: none}}
    model_info: {{mode: embedding}}
general_settings: {{master_key: {KEY}}}
litellm_settings: {{telemetry: false, num_retries: 0}}
"""


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
            ask(openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key=KEY, max_retries=0))
        finally:
            proxy.terminate()
print("ok")
