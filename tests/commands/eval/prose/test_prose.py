"""Prose cases: their facts, the place of the question, the instructions after it, the length, bad inputs."""

import json
import random
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from commands.cli import main
from commands.eval.options import Pack, ProseOptions
from commands.eval.prompts import Prompt
from commands.eval.prose.haystack import load_haystacks
from commands.eval.prose.layout import INSTRUCTIONS, QuestionPosition, Turns, cut_instructions
from commands.eval.prose.paraphrases import PARAPHRASES
from commands.eval.prose.prompts import ProsePromptWriter
from commands.eval.prose.tasks import PROSE_TASKS
from commands.eval.scoring import score
from commands.eval.tasks.case import Case, Scoring
from server.options.models import DEMO_MODEL
from server.text.tokenizer import Tokenizer

LENGTH = 2000
TOKENIZER = Tokenizer.load(str(DEMO_MODEL))
every_task = pytest.mark.parametrize("name", PROSE_TASKS)


haystacks = cache(load_haystacks)


def count(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False))


def prompt_of(name: str, index: int = 0, **options: Any) -> Prompt:
    cases = ProseOptions(**{"length": LENGTH, **options})
    return ProsePromptWriter(TOKENIZER, haystacks(cases.haystack), cases).write(PROSE_TASKS[name], index)


def text_of(prompt: Prompt) -> str:
    return TOKENIZER.decode(prompt.token_ids)


@every_task
def test_cases_depend_on_seed_and_index_alone(name: str) -> None:
    assert prompt_of(name) == prompt_of(name)
    assert prompt_of(name, 1).case != prompt_of(name).case
    assert prompt_of(name, seed=1).case != prompt_of(name).case


@every_task
def test_layouts_share_facts_and_question(name: str) -> None:
    plain = prompt_of(name).case
    for options in ({"question_position": "first"}, {"trailing_tokens": 100}, {"turns": "several"}):
        other = prompt_of(name, **options).case
        assert (other.question, other.references) == (plain.question, plain.references)


def values_of(case: Case) -> list[str]:
    if case.scoring is Scoring.RECORDS:
        return [value for record in case.references for value in json.loads(record).values()]
    return list(case.references)


@every_task
@pytest.mark.parametrize("position", QuestionPosition)
def test_the_document_has_each_value_once_and_the_perfect_answer_scores(
    name: str, position: QuestionPosition
) -> None:
    for index in range(3):
        prompt = prompt_of(name, index, question_position=position)
        for value in values_of(prompt.case):
            assert text_of(prompt).count(value) == 1
        assert score(prompt.case, prompt.case.answer) == 1
        assert score(prompt.case, "") == 0


def test_a_changed_fact_has_its_latest_value_after_the_old_one() -> None:
    facts = PROSE_TASKS["changed"].draw(random.Random(0), "")
    old, latest = facts.statements
    assert facts.answer in latest
    assert facts.answer not in old


def test_similar_facts_differ_only_in_key_and_value() -> None:
    facts = PROSE_TASKS["among_similar"].draw(random.Random(0), "")
    assert len(set(facts.statements)) == 8
    assert len({sentence.split()[0] for sentence in facts.statements}) == 1


@every_task
@pytest.mark.parametrize("uses_chat_template", [True, False])
def test_prompts_have_the_length_or_lack_at_most_a_sentence(name: str, uses_chat_template: bool) -> None:
    (haystack,) = haystacks("jargon")
    longest = max(count(sentence) for sentence in haystack.sentences)
    prompt = prompt_of(name, haystack="jargon", chat_template=uses_chat_template)
    assert LENGTH - longest <= len(prompt.token_ids) <= LENGTH


@pytest.mark.parametrize("position", QuestionPosition)
def test_the_question_is_at_its_position(position: QuestionPosition) -> None:
    prompt = prompt_of("code", question_position=position, trailing_tokens=100)
    text = text_of(prompt)
    assert text.count(prompt.case.question) == 1
    before, after = (count(part) for part in text.split(prompt.case.question))
    share = before / (before + after)
    document_share = {
        QuestionPosition.FIRST: share < 0.05,
        QuestionPosition.MIDDLE: 0.35 < share < 0.65,
        QuestionPosition.LAST: share > 0.85,
    }
    assert document_share[position]
    assert text.index(prompt.case.question) < text.index(INSTRUCTIONS[0])


@pytest.mark.parametrize("num_tokens", [20, 40, 100, 200])
def test_instructions_have_the_requested_tokens_to_within_a_sentence(num_tokens: int) -> None:
    longest = max(count(f" {sentence}") for sentence in INSTRUCTIONS)
    text = cut_instructions(random.Random(num_tokens), num_tokens, count)
    assert num_tokens - longest <= count(text) <= num_tokens
    assert text.startswith(INSTRUCTIONS[0])
    prompt = prompt_of("code", trailing_tokens=num_tokens)
    _, rest = text_of(prompt).split(prompt.case.question)
    num_template_tokens = 10
    assert num_tokens - longest <= count(rest) <= num_tokens + num_template_tokens


def test_no_instructions_follow_the_question_by_default() -> None:
    assert cut_instructions(random.Random(0), 0, count) == ""
    assert INSTRUCTIONS[0] not in text_of(prompt_of("code"))


def test_several_turns_separate_the_document_from_the_question() -> None:
    prompt = prompt_of("code", turns=Turns.SEVERAL)
    text = text_of(prompt)
    document, exchange = text.split("I have read the text. What would you like to know?")
    assert prompt.case.context.strip() in document
    assert prompt.case.question not in document
    assert prompt.case.question in exchange
    assert text.count("?") >= 3


@pytest.mark.parametrize("turns", Turns)
def test_packing_before_the_question_leaves_it_and_the_instructions_to_decode(turns: Turns) -> None:
    prompt = prompt_of("code", pack=Pack.BEFORE_QUESTION, turns=turns, trailing_tokens=40)
    read = TOKENIZER.decode(prompt.token_ids[: prompt.num_prefill_tokens])
    rest = TOKENIZER.decode(prompt.token_ids[prompt.num_prefill_tokens :])
    assert prompt.case.context.strip() in read
    assert prompt.case.question in rest
    assert INSTRUCTIONS[0] in rest


def test_packing_before_the_answer_leaves_one_token_or_the_prefix_to_decode() -> None:
    prompt = prompt_of("code")
    assert prompt.num_prefill_tokens == len(prompt.token_ids) - 1
    prompt = prompt_of("code", answer_prefix=True, chat_template=False)
    rest = TOKENIZER.decode(prompt.token_ids[prompt.num_prefill_tokens :])
    assert rest.strip() == f"Answer: {prompt.case.answer_prefix}"


def test_every_kind_has_six_wordings_of_statements_and_questions() -> None:
    from commands.eval.prose import wordings

    kinds = [value for value in vars(wordings).values() if isinstance(value, wordings.Kind)]
    assert len(kinds) == 9
    for kind in kinds:
        assert min(len(set(kind.statements)), len(set(kind.questions))) >= 6
        assert all("{key}" in text and "{value}" in text for text in (*kind.statements, kind.plain))
        assert all("{key}" in text for text in kind.questions)


# Words without content, which any text has.
_STOP_WORDS = """a after all and are as at be been by can do does for from go has have how i if in is
    it much new not now of on or should the there they to want what when where which who whom will with would
    you"""


def _content(text: str) -> set[str]:
    """Return the first four letters of each content word."""
    words = re.findall(r"[a-z]+", text.lower().replace("{key}", "").replace("{value}", ""))
    return {word[:4] for word in words if word not in _STOP_WORDS.split()}


def test_questions_in_other_words_share_no_content_word_with_the_fact() -> None:
    for kind in PARAPHRASES:
        in_statements, in_questions = (_content(" ".join(names)) for names in zip(*kind.pairs, strict=True))
        statements = _content(" ".join(kind.statements)) | in_statements
        assert not statements & (_content(" ".join((*kind.questions, kind.answer_prefix))) | in_questions)
        assert (len(set(kind.pairs)), len(set(kind.statements)), len(set(kind.questions))) == (12, 4, 4)


def _write_binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00caf\xe9")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda _: None, "--haystack must be one of prose, novel, jargon or a file of UTF-8 text, got"),
        (_write_binary, "--haystack must be one of prose, novel, jargon or a file of UTF-8 text, got"),
        (partial(_write_text, text="One sentence."), "must have at least 20 sentences, got 1"),
        (partial(_write_text, text="A short one. " * 30), "must have enough text for --length 600"),
    ],
)
def test_an_unsuitable_haystack_is_reported(
    write: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    write(file)
    arguments = ("--haystack", str(file), "--length", "600", "--num-cases", "1", "--tasks", "code")
    assert main(["eval", "prose", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", "niah_single_1"), "--tasks must be one of code, words, "),
        (("--trailing-tokens", "300"), "--trailing-tokens must be a number from 0 to 250, got '300'"),
        (("--turns", "several", "--no-chat-template"), "--turns several needs --chat-template"),
        (
            ("--turns", "several", "--question-position", "first"),
            "--turns several needs --question-position last, got first",
        ),
        (
            ("--pack", "before-question", "--question-position", "middle"),
            "--pack before-question needs --question-position last, got middle",
        ),
        (("--length", "128", "--num-cases", "1"), "--length 128 is too short: "),
    ],
)
def test_unsuitable_options_are_refused_before_any_work(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "prose", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_answers_of_its_own_engine_come_from_packed_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"This is sentence {index} of a plain text." for index in range(200)))
    arguments = ("--num-cases", "1", "--length", "700", "--tasks", "code", "several", "--haystack", str(file))
    layout = ("--turns", "several", "--trailing-tokens", "20", "--compression", "4")
    assert main(["eval", "prose", *arguments, *layout, "--model", str(DEMO_MODEL), "--json"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (result["suite"], result["turns"], result["trailing_tokens"]) == ("prose", "several", 20)
    assert (result["from_packed_slot"], list(result["scores"])) == (True, ["code", "several"])
    assert "snapstream 4x" in output.err
