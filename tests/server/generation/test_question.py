"""Which tokens reach the engine as the question of a long prompt."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from backends.fake import slot_pool
from cache.policy import snapstream
from cache.scorer import WindowScorer
from server.text.renderer import Renderer
from tests.server.serving import MODEL, RunningServer, serve, spec

TEXT = "Anna keeps a falcon. Ben keeps a cat. Carl keeps a fox. Dora keeps a goat."
QUESTION = "What does Ben keep?"
POOLS = (slot_pool(2, snapstream(2, 8, 8, WindowScorer(observation_window=4, num_echoed=12)), 256),)


@pytest.fixture(scope="module")
def running(renderer: Renderer) -> Iterator[RunningServer]:
    with serve(renderer, backend_spec=spec(pools=POOLS, max_model_len=256)) as server:
        yield server


def question_of(running: RunningServer, renderer: Renderer, path: str, **body: Any) -> str:
    """Return what the engine got as the question of a request."""
    response = httpx.post(f"{running.url}{path}", json={"model": MODEL, "max_tokens": 1} | body)
    assert response.status_code == 200, response.text
    add = running.observed.adds[-1]
    question = renderer._tokenizer.decode(add.question_token_ids)
    assert add.question_weight == (1.0 if "?" in question else 0.25)
    return question


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("user", f"What does Ben keep?\n\n{TEXT}")], "What does Ben keep?\n\n"),
        (
            [("system", "Answer in one word."), ("user", f"What does Ben keep?\n\n{TEXT}")],
            "What does Ben keep?\n\n",
        ),
        ([("user", TEXT), ("assistant", "Yes."), ("user", "What does Ben keep?")], "What does Ben keep?"),
        ([("user", f"{TEXT}\n\nWhat does Ben keep?")], "What does Ben keep?"),
        ([("user", f"{TEXT}\n\nWhat does Ben keep?\n\nAnswer in one word.")], "What does Ben keep?"),
        (
            [("system", "Unsure? Say so."), ("assistant", "Anything else?"), ("user", "Name a pet.")],
            "Name a pet.",
        ),
    ],
    ids=["first", "behind a system prompt", "a later turn", "last", "before instructions", "none"],
)
def test_a_chats_question_is_its_last_message(
    running: RunningServer, renderer: Renderer, messages: list[tuple[str, str]], expected: str
) -> None:
    chat = [{"role": role, "content": content} for role, content in messages]
    assert question_of(running, renderer, "/v1/chat/completions", messages=chat) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": f"What does Ben keep?\n\n{TEXT}"}, "<|bos|>What does Ben keep?\n\n"),
        (
            {"prompt": f"{TEXT}\n\nWhat does Ben keep?", "question": "What does Ben keep?"},
            "What does Ben keep?",
        ),
    ],
    ids=["the prompt's beginning", "named"],
)
def test_a_completions_question_may_be_named(
    running: RunningServer, renderer: Renderer, body: dict[str, Any], expected: str
) -> None:
    assert question_of(running, renderer, "/v1/completions", **body) == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": f"{TEXT}\n\nWhat does Ben keep?"}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": f"{TEXT}\n\nWhat does Ben keep?"}]},
        ),
    ],
)
def test_what_decode_reads_is_no_question(
    running: RunningServer, renderer: Renderer, path: str, body: dict[str, Any]
) -> None:
    assert question_of(running, renderer, path, **body) == "What does Ben keep?"
    shortened = question_of(running, renderer, path, **body, num_prefill_tokens=12)
    assert "What" not in shortened
    assert "Anna" in shortened


def test_a_token_outside_the_vocabulary_is_refused(running: RunningServer) -> None:
    response = httpx.post(
        f"{running.url}/v1/completions", json={"model": MODEL, "max_tokens": 1, "prompt": [5, 10**6]}
    )
    assert response.status_code == 400
    assert "1000000" in response.json()["error"]["message"]
