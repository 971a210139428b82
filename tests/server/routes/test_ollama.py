"""Ollama's own Python package, and the real server."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import ollama
import pytest
from transformers import AutoTokenizer

from backends.interface import BackendError
from server.options.models import DEMO_MODEL
from server.options.settings import ToolParserName
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.server.routes.test_tools import TEMPLATE, WEATHER
from tests.server.scripted import scripted_by
from tests.server.serving import MODEL, RunningServer, serve, settings, spec

HELLO: Any = [{"role": "user", "content": "Where does Anna keep the lamp?"}]
SHORT: Any = {"num_predict": 8, "seed": 1, "num_ctx": 4096, "repeat_last_n": 64}


@pytest.fixture(scope="module")
def llama(running: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=running.url) as client:
        yield client


@pytest.fixture(scope="module")
def thinker() -> Iterator[Renderer]:
    inner = AutoTokenizer.from_pretrained(DEMO_MODEL)
    inner.chat_template = TEMPLATE
    renderer = Renderer(Tokenizer(inner, {"eos_token_id": 2}))
    yield renderer
    renderer.close()


def test_a_streamed_chat_equals_the_whole_one(llama: ollama.Client) -> None:
    whole = llama.chat(MODEL, HELLO, options=SHORT, keep_alive="5m")
    lines = list(llama.chat(MODEL, HELLO, options=SHORT, stream=True))
    assert whole.message.content
    assert "".join(line.message.content or "" for line in lines) == whole.message.content
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    last = lines[-1]
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count) == ("length", 8)
    assert last.prompt_eval_count == whole.prompt_eval_count
    assert whole.total_duration is not None
    assert whole.prompt_eval_duration is not None
    assert whole.total_duration >= whole.prompt_eval_duration > 0


def test_a_generation(llama: ollama.Client) -> None:
    whole = llama.generate(MODEL, "Where is the lamp?", system="Be brief.", options=SHORT)
    lines = list(llama.generate(MODEL, "Where is the lamp?", system="Be brief.", options=SHORT, stream=True))
    assert whole.response
    assert "".join(line.response or "" for line in lines) == whole.response
    chat = llama.chat(
        MODEL,
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the lamp?"}],
        options=SHORT,
    )
    assert (whole.response, whole.prompt_eval_count) == (chat.message.content, chat.prompt_eval_count)
    raw = llama.generate(MODEL, "Anna keeps", raw=True, options=SHORT)
    assert raw.prompt_eval_count is not None
    assert whole.prompt_eval_count is not None
    assert raw.prompt_eval_count < whole.prompt_eval_count


def test_a_stream_is_the_default_and_has_a_line_an_object(running: RunningServer) -> None:
    body = {"model": f"{MODEL}:latest", "messages": HELLO, "options": {"num_predict": 4}}
    response = httpx.post(f"{running.url}/api/chat", json=body)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["model"] for line in lines] == [MODEL] * len(lines)
    assert lines[-1]["message"] == {"role": "assistant", "content": ""}


def test_stop_and_greedy_options(llama: ollama.Client) -> None:
    options: Any = {"temperature": 0, "num_predict": 24}
    text = llama.chat(MODEL, HELLO, options=options).message.content
    assert text is not None
    stop = text[len(text) // 2 :][:3]
    stopped = llama.chat(MODEL, HELLO, options=options | {"stop": [stop]})
    assert (stopped.message.content, stopped.done_reason) == (text[: text.index(stop)], "stop")


def test_without_a_limit_an_answer_ends_with_the_context(renderer: Renderer) -> None:
    endless = scripted_by(renderer, lambda _: "lamp " * 100)
    with (
        serve(renderer, backend_spec=spec(max_model_len=64), make_backend=endless) as server,
        ollama.Client(host=server.url) as client,
    ):
        for limit in (-1, -2, 900):
            answer = client.chat(MODEL, HELLO, options={"num_predict": limit})
            assert answer.done_reason == "length"
            assert answer.prompt_eval_count is not None
            assert answer.eval_count is not None
            assert answer.prompt_eval_count + answer.eval_count == 64


def test_answers_of_a_schema(llama: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"level": {"enum": ["low", "high"]}},
        "required": ["level"],
        "additionalProperties": False,
    }
    answer = llama.chat(MODEL, HELLO, format=schema, options={"num_predict": 100, "seed": 1})
    jsonschema.validate(json.loads(answer.message.content or ""), schema)
    free = llama.generate(MODEL, "Where?", format="json", options={"num_predict": 40, "seed": 1})
    assert (free.response or "").lstrip().startswith("{")


def test_a_turn_with_a_tool(renderer: Renderer) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        if "rain in Oslo" in prompt:
            return "It rains."
        return 'Hm.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

    own = settings(tool_call_parser=ToolParserName.HERMES)
    with (
        serve(renderer, own, make_backend=scripted_by(renderer, reply)) as server,
        ollama.Client(host=server.url) as client,
    ):
        options: Any = {"model": MODEL, "tools": [WEATHER]}
        asked = client.chat(**options, messages=HELLO).message
        lines = list(client.chat(**options, messages=HELLO, stream=True))
        result = {"role": "tool", "tool_name": "get_weather", "content": "rain in Oslo"}
        answer = client.chat(**options, messages=[*HELLO, asked, result])
    assert asked.content == "Hm."
    for calls in (asked.tool_calls, [call for line in lines for call in line.message.tool_calls or ()]):
        assert calls is not None
        [call] = calls
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    assert answer.message.content == "It rains."
    assert prompts[-1].count("get_weather") == 2


def test_thinking(thinker: Renderer) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "Anna has it.</think>The attic." if prompt.endswith("<think>\n") else "The attic."

    with (
        serve(thinker, make_backend=scripted_by(thinker, reply)) as server,
        ollama.Client(host=server.url) as client,
    ):
        chat = client.chat(MODEL, HELLO, think=True).message
        lines = list(client.chat(MODEL, HELLO, think=True, stream=True))
        generated = client.generate(MODEL, "Where?", think=True)
        quiet = client.chat(MODEL, HELLO, think=False).message
        client.chat(MODEL, HELLO, think="high")
        client.chat(MODEL, [*HELLO, chat, *HELLO])
        shown = client.show(MODEL)
    assert (chat.thinking, chat.content) == ("Anna has it.", "The attic.")
    assert "".join(line.message.thinking or "" for line in lines) == "Anna has it."
    assert (generated.thinking, generated.response) == ("Anna has it.", "The attic.")
    assert (quiet.thinking, quiet.content) == (None, "The attic.")
    assert "Anna has it." in prompts[-1]
    assert shown.capabilities == ["completion", "tools", "thinking"]


def test_what_there_is(llama: ollama.Client, running: RunningServer) -> None:
    [model] = llama.list().models
    assert model.model == MODEL
    shown = llama.show(MODEL)
    assert shown.template is not None
    assert "assistant" in shown.template
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 1024
    assert httpx.get(f"{running.url}/api/version").json()["version"]
    for loading in (llama.generate(MODEL), llama.chat(MODEL)):
        assert (loading.done, loading.done_reason) == (True, "load")


def test_errors_are_ollamas(llama: ollama.Client, renderer: Renderer) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as unknown:
        llama.chat("other", HELLO)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
        llama.chat(MODEL, HELLO, options={"temperature": 9})
    with pytest.raises(ollama.ResponseError, match="images"):
        llama.chat(MODEL, [HELLO[0] | {"images": [b"x"]}])
    fault = dict.fromkeys((3, 4), BackendError("a step failed at address 0x7f00"))
    with (
        serve(renderer, backend_spec=spec(max_decode_steps=1), faults=fault) as server,
        ollama.Client(host=server.url) as client,
        pytest.raises(ollama.ResponseError, match="had an error"),
    ):
        list(client.chat(MODEL, HELLO, stream=True, options={"num_predict": 90}))


def test_options_of_its_runner_are_reported_and_other_samplers_refused(running: RunningServer) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": False}
    url = f"{running.url}/api/chat"
    some = {"num_predict": 2, "num_ctx": 4096, "temprature": 0, "mirostat": 0, "tfs_z": 1.0}
    answer = httpx.post(url, json=body | {"options": some})
    assert answer.status_code == 200
    reported = set(answer.headers["x-ignored-parameters"].split(", "))
    assert reported == {"options.num_ctx", "options.temprature", "options.mirostat", "options.tfs_z"}
    refused = httpx.post(url, json=body | {"options": {"mirostat": 2}})
    assert refused.status_code == 400
    assert "options.mirostat" in refused.json()["error"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"dimensions": 0}, 200),  # Ollama's clients send it for all
        ({"dimensions": -1}, 400),
        ({"dimensions": 2**31}, 400),
        ({"dimensions": 1.5}, 400),
        ({"input": []}, 400),
        ({"input": [""]}, 400),
        ({"input": None}, 400),
        ({"truncate": False}, 200),
    ],
    ids=str,
)
def test_embeddings_of_odd_requests(running: RunningServer, fields: dict[str, object], status: int) -> None:
    response = httpx.post(f"{running.url}/api/embed", json={"input": "a", **fields})
    assert response.status_code == status, response.text


def test_embeddings_are_those_of_the_other_route(llama: ollama.Client, running: RunningServer) -> None:
    texts = ["Anna keeps the lamp.", "Boris"]
    found = llama.embed(MODEL, texts)
    same = httpx.post(f"{running.url}/v1/embeddings", json={"input": texts}).json()
    assert [list(vector) for vector in found.embeddings] == [item["embedding"] for item in same["data"]]
    assert found.prompt_eval_count == same["usage"]["prompt_tokens"]
    assert [len(vector) for vector in llama.embed(MODEL, "Anna", dimensions=2).embeddings] == [2]
    long = "lamp " * 2000  # beyond the context
    assert llama.embed(MODEL, long).prompt_eval_count == 1024
    with pytest.raises(ollama.ResponseError, match="tokens"):
        llama.embed(MODEL, long, truncate=False)


def test_the_model_is_always_running(llama: ollama.Client) -> None:
    [running] = llama.ps().models
    assert (running.model, running.context_length) == (MODEL, 1024)
    assert running.expires_at is not None
