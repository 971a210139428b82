"""A chat's next turn restores its history: the template renders it as it was read and generated."""

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.process import Server

BLOCK = 32
DOCUMENT = " ".join(
    f"Room {number} of the house is kept by person {number * 7 % 100}." for number in range(40)
)


def check_conversation(server: Server, num_turns: int = 3) -> None:
    """Talk for some turns. All tokens of a turn's history are restored, but for a part of a block.

    The answer's last token is sampled and never written, and its end may be rendered in other tokens than it
    was generated in. So up to one more block may be read.
    """
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": f"{DOCUMENT} Tell me a story about room 3."}
    ]
    history = 0
    for turn in range(num_turns):
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id, messages=messages, max_tokens=50, temperature=0
        )
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        assert cached >= history // BLOCK * BLOCK - BLOCK, (turn, cached, history)
        assert cached % BLOCK == 0
        history = usage.prompt_tokens + usage.completion_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": f"And now a story about room {turn + 10}."})


@pytest.mark.long
def test_the_demo_models_history_is_restored(full_server: Server) -> None:
    check_conversation(full_server)


@pytest.mark.long
def test_smollm2s_history_is_restored(smollm2_server: Server) -> None:
    check_conversation(smollm2_server)
