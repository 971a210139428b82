"""A limit of reasoning, over a backend with random tokens under the mask."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from transformers import AutoTokenizer

from server.grammar.thinking import Thinking, ThinkingBudget, ThinkingMatcher
from server.options.models import DEMO_MODEL
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from server.text.vocabulary import Vocabulary
from tests.server.events import data
from tests.server.routes.test_tools import TEMPLATE
from tests.server.serving import MODEL, RunningServer, serve

HELLO: Any = [{"role": "user", "content": "Where does Anna keep the lamp?"}]
INNER = AutoTokenizer.from_pretrained(DEMO_MODEL)
VOCABULARY = Vocabulary(INNER)
THINKING = Thinking("<think>", "</think>", is_open=True)


def encode(text: str) -> list[int]:
    ids: list[int] = INNER.encode(text, add_special_tokens=False)
    return ids


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    """A server whose model has a switch for its reasoning, and no degrees."""
    inner = AutoTokenizer.from_pretrained(DEMO_MODEL)
    inner.chat_template = TEMPLATE.replace("{{ reasoning_effort }}", "")
    renderer = Renderer(Tokenizer(inner, {"eos_token_id": 2}))
    with serve(renderer) as server:
        yield server
    renderer.close()


def ask(server: RunningServer, **options: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 60, "ignore_eos": True, "temperature": 2.0} | options
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer | {"headers": response.headers}


@pytest.mark.parametrize("budget", [0, 1, 20])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("answer", [{}, {"guided_regex": "[a-c]{3}"}], ids=["free", "regex"])
def test_reasoning_ends_with_its_budget(
    thinker: RunningServer, budget: int, seed: int, answer: dict[str, Any]
) -> None:
    options = answer | {"seed": seed, "chat_template_kwargs": {"enable_thinking": True}}
    free = ask(thinker, **options)
    assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] == 60  # it never ends by itself
    limited = ask(thinker, thinking_token_budget=budget, **options)
    num_end = len(encode("</think>"))
    num_reasoning = limited["usage"]["completion_tokens_details"]["reasoning_tokens"]
    # A grammar may have to wait for the end of a character.
    assert budget + num_end <= num_reasoning <= budget + num_end + (3 if answer else 0)
    message = limited["choices"][0]["message"]
    assert message["content"]
    assert "</think>" not in message["content"]
    if answer:
        assert set(message["content"]) <= set("abc")


@pytest.mark.parametrize(("effort", "num_reasoning_tokens"), [("low", 60), ("none", 0)])
def test_an_effort_turns_the_templates_switch(
    thinker: RunningServer, effort: str, num_reasoning_tokens: int
) -> None:
    answer = ask(thinker, reasoning_effort=effort)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_reasoning_tokens
    assert "reasoning_effort" not in answer["headers"].get("x-ignored-parameters", "")


@pytest.mark.parametrize(
    ("options", "num_reasoning_tokens"),
    [
        ({"thinking": {"type": "enabled"}}, 60),
        ({"thinking": True}, 60),
        ({"reasoning": {"enabled": True}}, 60),
        ({"reasoning": {"max_tokens": 99}}, 60),
        ({"chat_template_kwargs": {"thinking": True}}, 60),
        ({"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}, 0),
        ({"thinking": {"type": "disabled"}}, 0),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}}, 0),
    ],
)
def test_other_servers_spell_the_switch_otherwise(
    thinker: RunningServer, options: dict[str, Any], num_reasoning_tokens: int
) -> None:
    answer = ask(thinker, **options)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_reasoning_tokens
    assert "x-ignored-parameters" not in answer["headers"]


@pytest.mark.parametrize(
    ("options", "num_reasoning_tokens"),
    [
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, 0),
        ({"reasoning_effort": "low", "thinking": False}, 60),
        ({"thinking": "hard"}, 0),
        ({"thinking": {"type": "auto"}}, 0),
    ],
)
def test_a_switch_that_does_not_decide_is_reported(
    thinker: RunningServer, options: dict[str, Any], num_reasoning_tokens: int
) -> None:
    answer = ask(thinker, **options)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_reasoning_tokens
    assert answer["headers"]["x-ignored-parameters"] == "thinking"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"thinking": {}}, "thinking"),
        ({"thinking": {"budget_tokens": 5}}, None),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.type"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}, "reasoning_effort": "low"}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}, "reasoning_effort": "low"}, None),
        ({"reasoning": {"enabled": True}, "reasoning_effort": "none"}, "reasoning.enabled"),
        ({"reasoning": {"enabled": False}, "reasoning_effort": "high"}, "reasoning.enabled"),
        ({"reasoning": {"enabled": True, "effort": "none"}}, "reasoning.enabled"),
        ({"reasoning": {"enabled": False, "effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        ({"reasoning": {"enabled": True, "effort": "high"}, "reasoning_effort": "high"}, None),
        ({"reasoning": {"enabled": False, "effort": "none"}}, None),
    ],
    ids=str,
)
def test_what_contradicts_is_reported_and_nothing_else(
    thinker: RunningServer, options: dict[str, Any], names: str | None
) -> None:
    answer = ask(thinker, **options)
    assert answer["headers"].get("x-ignored-parameters") == names


@pytest.mark.parametrize("num_tokens", [5, 20])
def test_a_budget_counts_without_a_known_type(thinker: RunningServer, num_tokens: int) -> None:
    options = {"seed": 1, "chat_template_kwargs": {"enable_thinking": True}}
    ours = ask(thinker, thinking_token_budget=num_tokens, **options)
    theirs = ask(thinker, thinking={"type": "adaptive", "budget_tokens": num_tokens}, **options)
    assert theirs["choices"] == ours["choices"]


def test_of_two_switches_that_differ_the_templates_own_counts(thinker: RunningServer) -> None:
    answer = ask(thinker, chat_template_kwargs={"thinking": True, "enable_thinking": False})
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert answer["headers"]["x-ignored-parameters"] == "chat_template_kwargs.thinking"


@pytest.mark.parametrize("name", ["thinking", "chat_template_kwargs.thinking", "reasoning.enabled"])
def test_a_switch_of_what_is_no_reasoning_is_reported(running: RunningServer, name: str) -> None:
    outer, _, inner = name.partition(".")
    answer = ask(running, **{outer: {inner: True} if inner else True})
    assert answer["headers"]["x-ignored-parameters"] == name


def test_hidden_reasoning_is_streamed_with_its_log_probabilities(thinker: RunningServer) -> None:
    body = {"messages": HELLO, "max_tokens": 20, "ignore_eos": True, "reasoning_effort": "low"}
    hidden = {"include_reasoning": False, "logprobs": True, "stream": True}
    with httpx.stream("POST", f"{thinker.url}/v1/chat/completions", json=body | hidden) as response:
        choices = [chunk["choices"][0] for chunk in data(response)]
    assert all(not choice["delta"].get("content") for choice in choices)
    found = [choice["logprobs"]["content"] for choice in choices if choice.get("logprobs")]
    assert sum(len(tokens) for tokens in found) == 20


@pytest.mark.parametrize(
    "spelling",
    [
        {"thinking_budget_tokens": 5},
        {"reasoning_budget_tokens": 5},
        {"reasoning": {"max_tokens": 5.0}},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"thinking_token_budget": 5, "reasoning": {"max_tokens": 9}, "thinking_budget_tokens": -5},
    ],
)
def test_other_servers_spell_the_budget_otherwise(thinker: RunningServer, spelling: dict[str, Any]) -> None:
    options = {"seed": 1, "chat_template_kwargs": {"enable_thinking": True}}
    ours = ask(thinker, thinking_token_budget=5, **options)
    assert ask(thinker, **spelling, **options)["choices"] == ours["choices"]


def test_several_choices_have_a_budget_each(thinker: RunningServer) -> None:
    answer = ask(
        thinker, n=2, seed=3, thinking_token_budget=5, chat_template_kwargs={"enable_thinking": True}
    )
    texts = [choice["message"]["reasoning_content"] for choice in answer["choices"]]
    assert texts[0] != texts[1]
    assert all(choice["message"]["content"] for choice in answer["choices"])


@pytest.mark.parametrize("name", ["thinking_token_budget", "reasoning_budget_tokens"])
def test_a_budget_of_what_is_no_reasoning_is_reported(running: RunningServer, name: str) -> None:
    assert ask(running, **{name: 5})["headers"]["x-ignored-parameters"] == name


def test_a_budget_that_does_not_decide_is_reported(thinker: RunningServer) -> None:
    both = {"thinking_token_budget": 5, "reasoning": {"max_tokens": 9}}
    assert ask(thinker, **both)["headers"]["x-ignored-parameters"] == "reasoning.max_tokens"
    rules = {"reasoning": {"max_tokens": 9}, "bad_words": ["bad"]}
    assert ask(thinker, **rules)["headers"]["x-ignored-parameters"] == "reasoning.max_tokens"


def test_no_tokens_of_reasoning_are_a_budget_too(thinker: RunningServer) -> None:
    options = {"seed": 1, "chat_template_kwargs": {"enable_thinking": True}}
    none = ask(thinker, reasoning={"max_tokens": 0}, **options)
    assert none["choices"] == ask(thinker, thinking_token_budget=0, **options)["choices"]


def test_anthropics_budget(thinker: RunningServer) -> None:
    with anthropic.Anthropic(base_url=thinker.url, api_key="any", max_retries=0, timeout=30) as sdk:
        answer = sdk.messages.create(
            model=MODEL,
            max_tokens=60,
            messages=HELLO,
            thinking={"type": "enabled", "budget_tokens": 10},
            extra_body={"ignore_eos": True, "seed": 1},
        )
    assert [block.type for block in answer.content] == ["thinking", "text"]


def matcher(num_tokens: int, *, is_open: bool) -> ThinkingMatcher:
    thinking = Thinking("<think>", "</think>", is_open)
    text = ThinkingBudget(num_tokens, thinking, encode("</think>"), None).text()
    budget = ThinkingBudget.parse(text)
    assert budget is not None
    return ThinkingMatcher(budget, None, VOCABULARY)


def is_free(found: ThinkingMatcher) -> bool:
    return found.allowed().may_end


@pytest.mark.parametrize(
    ("text", "is_open", "is_forced"),
    [
        ("one two three four five six", True, True),
        ("one</think> two three four five six", True, False),
        ("<think>one two three four five six", False, True),
        ("\n<think>one</think> two three four five", False, False),
        ("one two three four five six <think>", False, False),
    ],
)
def test_only_reasoning_counts(text: str, is_open: bool, is_forced: bool) -> None:
    found = matcher(8, is_open=is_open)
    states = [is_free(found)]
    for token_id in encode(text):
        if not is_free(found):
            break
        found.advance(token_id)
        states.append(is_free(found))
    assert (not all(states)) is is_forced


def test_reasoning_that_begins_again_shares_the_budget() -> None:
    found = matcher(8, is_open=True)
    for token_id in encode("one two three</think><think>four five six seven eight nine"):
        if not is_free(found):
            return
        found.advance(token_id)
    raise AssertionError("the second part has a budget of its own")


def test_a_mask_is_needed_only_where_the_end_is_forced() -> None:
    found = matcher(8, is_open=True)
    assert found.allowed().num_free == 8
    for token_id in encode("one</think>"):
        found.advance(token_id)
    found.advance(encode(" two")[0])
    assert found.allowed().num_free > 10**6


def test_another_grammar_is_no_budget() -> None:
    assert ThinkingBudget.parse('{"grammars": []}') is None
