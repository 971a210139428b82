"""Where in a prompt prefill ends."""

import pytest

from commands.eval.options import Pack
from commands.eval.prompts import PromptWriter
from commands.eval.tasks.suite import TASKS
from server.options.models import DEMO_MODEL
from server.text.tokenizer import Tokenizer

LENGTH = 700


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(DEMO_MODEL))


@pytest.mark.parametrize("uses_chat_template", [False, True])
@pytest.mark.parametrize("pack", Pack)
@pytest.mark.parametrize("name", ["niah_multiquery", "kv_lookup", "text2json"])
def test_prefill_ends_at_the_requested_token(
    tokenizer: Tokenizer, name: str, pack: Pack, uses_chat_template: bool
) -> None:
    prompt = PromptWriter(tokenizer, LENGTH, pack, uses_chat_template=uses_chat_template).write(
        TASKS[name], 0, 0
    )
    read, rest = (
        tokenizer.decode(part)
        for part in (
            prompt.token_ids[: prompt.num_prefill_tokens],
            prompt.token_ids[prompt.num_prefill_tokens :],
        )
    )
    assert LENGTH - 100 < len(prompt.token_ids) <= LENGTH
    assert rest.endswith(prompt.case.answer_prefix)
    assert (prompt.case.question.strip() in read) == (pack is Pack.BEFORE_ANSWER)
    assert (prompt.case.question.strip() in rest) == (pack is Pack.BEFORE_QUESTION)
    assert prompt.case.context.strip() in read
    is_known = uses_chat_template and pack is Pack.BEFORE_ANSWER
    assert prompt.question == (prompt.case.context + prompt.case.question if is_known else None)


def test_max_tokens_exceed_the_perfect_answer(tokenizer: Tokenizer) -> None:
    prompt = PromptWriter(tokenizer, LENGTH, Pack.BEFORE_ANSWER, uses_chat_template=False).write(
        TASKS["kv_lookup"], 0, 0
    )
    assert prompt.max_tokens > len(tokenizer.encode(prompt.case.answer, add_special_tokens=False))
    assert prompt.num_decoded == len(prompt.token_ids) - prompt.num_prefill_tokens + prompt.max_tokens
