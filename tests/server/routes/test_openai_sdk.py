"""The real SDK and the real server: chats and completions, streamed or not, and exceptions."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion

from backends.interface import BackendError
from scheduler.config import SchedulerConfig
from server.options.settings import Limits
from server.text.renderer import Renderer
from tests.server.serving import MODEL, RunningServer, serve, settings, spec

HELLO: Any = [{"role": "user", "content": "Where does Anna keep the lamp?"}]
LONG: Any = {"ignore_eos": True}


def chat(sdk: openai.OpenAI, **options: Any) -> ChatCompletion:
    raw = sdk.chat.completions.with_raw_response.create(
        **{"model": MODEL, "messages": HELLO, "temperature": 1, "max_tokens": 8} | options
    )
    return ChatCompletion.model_validate_json(raw.content, strict=True)


def stream_chat(sdk: openai.OpenAI, **options: Any) -> list[ChatCompletionChunk]:
    chunks = sdk.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "temperature": 1, "max_tokens": 8, "stream": True} | options
    )
    return [ChatCompletionChunk.model_validate_json(chunk.to_json(), strict=True) for chunk in chunks]


def complete(sdk: openai.OpenAI, **options: Any) -> Completion:
    request: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Anna keeps",
        "temperature": 1,
        "max_tokens": 8,
    } | options
    raw = sdk.completions.with_raw_response.create(**request)
    return Completion.model_validate_json(raw.content, strict=True)


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(
        choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index
    )


def test_chat(sdk: openai.OpenAI) -> None:
    answer = chat(sdk, extra_body=LONG)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.refusal is None
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens == 8
    assert usage.total_tokens == usage.prompt_tokens + 8
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_equals_the_unstreamed_one(sdk: openai.OpenAI) -> None:
    whole = chat(sdk, seed=3, n=3, max_tokens=20, extra_body=LONG)
    chunks = stream_chat(
        sdk, seed=3, n=3, max_tokens=20, extra_body=LONG, stream_options={"include_usage": True}
    )
    for choice in whole.choices:
        assert text_of(chunks, choice.index) == choice.message.content
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert chunks[-1].usage == whole.usage
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_a_seed_repeats_an_answer_and_no_seed_does_not(sdk: openai.OpenAI) -> None:
    first, second = (chat(sdk, seed=11, extra_body=LONG).choices[0].message.content for _ in range(2))
    assert first == second
    assert len({chat(sdk, max_tokens=16, extra_body=LONG).choices[0].message.content for _ in range(3)}) == 3


def test_a_negative_seed_is_a_seed(sdk: openai.OpenAI) -> None:
    first, second = (chat(sdk, seed=-(2**63), extra_body=LONG).choices[0].message.content for _ in range(2))
    assert first == second


def test_stop_strings_end_an_answer_before_them(sdk: openai.OpenAI) -> None:
    text = chat(sdk, temperature=0, max_tokens=24, extra_body=LONG).choices[0].message.content
    assert text is not None
    stop = text[len(text) // 2 :][:3]
    stopped = chat(sdk, temperature=0, max_tokens=24, stop=[stop], extra_body=LONG)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].to_dict()["stop_reason"] == stop
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 24
    chunks = stream_chat(sdk, temperature=0, max_tokens=24, stop=stop, extra_body=LONG)
    assert text_of(chunks) == text[: text.index(stop)]


def test_chat_logprobs(sdk: openai.OpenAI) -> None:
    [choice] = chat(sdk, temperature=0, logprobs=True, top_logprobs=3, extra_body=LONG).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert len(content) == 8
    assert (
        b"".join(bytes(token.bytes or []) for token in content).decode(errors="replace")
        == choice.message.content
    )
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy: the chosen token is the likeliest
        assert token.logprob == token.top_logprobs[0].logprob <= 0


def test_streamed_logprobs_are_those_of_the_whole_answer(sdk: openai.OpenAI) -> None:
    options: Any = {"temperature": 0, "logprobs": True, "top_logprobs": 2, "extra_body": LONG}
    [whole] = chat(sdk, **options).choices
    streamed = [choice.logprobs for chunk in stream_chat(sdk, **options) for choice in chunk.choices]
    tokens = [token for logprobs in streamed if logprobs is not None for token in logprobs.content or []]
    assert whole.logprobs is not None
    assert [token.to_dict() for token in tokens] == [
        token.to_dict() for token in whole.logprobs.content or []
    ]


def test_completions_of_several_prompts_are_numbered_prompt_by_prompt(sdk: openai.OpenAI) -> None:
    together = complete(sdk, prompt=["Anna", "Ben keeps a"], n=2, seed=5, extra_body=LONG)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    alone = complete(sdk, prompt="Ben keeps a", n=2, seed=5, extra_body=LONG)
    assert [choice.text for choice in together.choices[2:]] == [choice.text for choice in alone.choices]
    assert together.usage is not None
    assert together.usage.completion_tokens == 32


def test_completions_stream(sdk: openai.OpenAI) -> None:
    whole = complete(sdk, temperature=0, extra_body=LONG)
    chunks = list(
        sdk.completions.create(
            model=MODEL, prompt="Anna keeps", temperature=0, max_tokens=8, stream=True, extra_body=LONG
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        "length"
    ]


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    model = sdk.models.retrieve(MODEL)
    assert (model.id, model.object) == (MODEL, "model")


async def test_the_asynchronous_client(running: RunningServer) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=30
    ) as sdk:
        answer = await sdk.chat.completions.create(
            model=MODEL, messages=HELLO, temperature=0, max_tokens=8, extra_body=LONG
        )
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=HELLO, temperature=0, max_tokens=8, stream=True, extra_body=LONG
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == answer.choices[0].message.content


def test_wrong_requests_raise_bad_request(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(sdk, temperature=3)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")


def test_too_long_a_request_raises_bad_request_with_its_code(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as caught:
        chat(sdk, max_tokens=1024)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_an_unknown_model_raises_not_found(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        chat(sdk, model="gpt-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_wrong_key_raises_authentication_error(renderer: Renderer) -> None:
    with serve(renderer, settings(api_keys=("one", "two"))) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="two", max_retries=0) as sdk:
            assert chat(sdk).choices
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="three", max_retries=0) as sdk,
            pytest.raises(openai.AuthenticationError) as caught,
        ):
            chat(sdk)
        assert caught.value.code == "invalid_api_key"


def test_a_full_server_raises_rate_limit_error_and_does_no_work(renderer: Renderer) -> None:
    config = SchedulerConfig(max_num_waiting=1)
    with (
        serve(renderer, backend_spec=spec(num_slots=1), config=config, is_open=False) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=30) as sdk,
    ):
        with ThreadPoolExecutor() as pool:
            running = pool.submit(chat, sdk, n=2)
            assert server.gate.arrived.acquire(timeout=30)
            with pytest.raises(openai.RateLimitError) as caught:
                stream_chat(sdk)
            server.gate.open()
            assert len(running.result().choices) == 2
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "rate_limit_exceeded"
        assert server.observed.num_refused == 1
        assert len(chat(sdk, n=2).choices) == 2  # both tickets were given back


def test_more_choices_than_slots_and_queue_hold_can_never_be_served(renderer: Renderer) -> None:
    with (
        serve(renderer, backend_spec=spec(num_slots=1), config=SchedulerConfig(max_num_waiting=1)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=30) as sdk,
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(sdk, n=3)
        assert caught.value.param == "n"
        assert len(chat(sdk, n=2).choices) == 2


def test_a_request_cannot_extend_the_servers_time_limits(renderer: Renderer) -> None:
    with (
        serve(renderer, settings(request_timeout=1e-6)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=30) as sdk,
        pytest.raises(openai.APIStatusError) as overdue,
    ):
        chat(sdk, extra_body={"request_timeout": 60})
    assert (overdue.value.status_code, overdue.value.code) == (408, "request_timeout")


def test_deadlines_raise_what_the_sdk_should_or_should_not_try_again(renderer: Renderer) -> None:
    with (
        serve(renderer, backend_spec=spec(num_slots=1)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=30) as sdk,
    ):
        with pytest.raises(openai.APIStatusError) as overdue:
            chat(sdk, extra_body={"request_timeout": 1e-6})
        assert (overdue.value.status_code, overdue.value.code) == (408, "request_timeout")
        assert overdue.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.RateLimitError) as caught:
            chat(sdk, extra_body={"queue_timeout": 1e-6})
        assert (caught.value.status_code, caught.value.code) == (429, "queue_timeout")
        assert "retry-after" in caught.value.response.headers


def test_a_request_over_the_servers_limits_is_refused(renderer: Renderer) -> None:
    limits = Limits(
        max_messages=1, max_choices=2, max_prompts=2, max_sequences=3, max_stop_strings=1, max_stop_length=4
    )
    refused_chats: list[tuple[str, Any]] = [
        ("messages", {"messages": HELLO * 2}),
        ("n", {"n": 3}),
        ("stop", {"stop": ["a", "b"]}),
        ("stop", {"stop": "abcde"}),
    ]
    refused_completions: list[tuple[str, Any]] = [
        ("prompt", {"prompt": ["a", "b", "c"]}),
        ("n", {"prompt": ["a", "b"], "n": 2}),
    ]
    with (
        serve(renderer, settings(limits=limits)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=30) as sdk,
    ):
        for ask, cases in ((chat, refused_chats), (complete, refused_completions)):
            for param, options in cases:
                with pytest.raises(openai.BadRequestError) as caught:
                    ask(sdk, **options)
                assert caught.value.param == param


def test_an_error_inside_a_stream_is_raised_by_the_sdk(renderer: Renderer) -> None:
    fault = dict.fromkeys((3, 4), BackendError("a step failed at address 0x7f00"))
    with (
        serve(renderer, backend_spec=spec(max_decode_steps=1), faults=fault) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=30) as sdk,
    ):
        with pytest.raises(openai.APIError) as caught:
            stream_chat(sdk, extra_body=LONG)
        assert caught.value.code == "internal_error"
        assert "0x7f00" not in str(caught.value.body)
        assert chat(sdk).choices  # the failed step ended no other request
