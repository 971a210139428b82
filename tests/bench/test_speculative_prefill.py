"""The baselines of a draft, which choose among the same chunks, and a run of all settings."""

import json
import random
from pathlib import Path

import pytest

from bench.speculative_prefill import SETTINGS, Plan, bm25, main, shortened_prompt, write_cases
from commands.eval.tasks.case import Case, Scoring
from server.options.models import DEMO_MODEL
from server.text.shortening import MARK
from server.text.tokenizer import Tokenizer

PETS = ("cat", "dog", "fox", "goat", "hen", "owl", "pig", "rat")
NAMES = ("Anna", "Ben", "Carl", "Dora")
LINES = [f"{name} keeps a {pet} in the house, and it is fine." for name in NAMES for pet in PETS]
CASE = Case(
    "t", "\n".join(LINES), "\n\nQuestion: Who keeps an owl? Is it Carl?\n", "Answer:", "Carl", (), Scoring.ALL
)


def test_rare_words_of_the_question_count_most() -> None:
    chunks = [["the", "cat"], ["the", "owl", "owl"], ["the", "dog"], ["the", "owl"] + ["dog"] * 30]
    scores = bm25(chunks, ["the", "owl"])
    assert scores[1] > scores[3] > scores[0] == scores[2] > 0
    assert bm25(chunks, ["fox"]) == [0, 0, 0, 0]


@pytest.mark.parametrize("setting", ["bm25", "newest", "random"])
def test_a_baseline_keeps_whole_lines_and_the_question(setting: str) -> None:
    framed = Tokenizer.load(str(DEMO_MODEL)).encode_framed(CASE.prompt, in_template=False)
    prompt = shortened_prompt(setting, CASE, framed, 0.5, random.Random(0))
    assert prompt.endswith(CASE.question + "Answer:")
    assert MARK in prompt
    kept = [line for line in prompt.split("\n") if line in LINES]
    assert 8 <= len(kept) < 32
    if setting == "bm25":
        assert LINES[8 * 2 + 5] in prompt
    if setting == "newest":
        assert kept[-8:] == LINES[-8:]


@pytest.mark.long
def test_all_settings_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    model = str(DEMO_MODEL)
    small = ["--length", "400", "--cases", "1", "--keep", "0.25", "--out", str(out)]
    small += ["--tasks", "passkey", "code"]
    assert main(["--model", model, "--draft", model, *small, "--serve-options", "--backend", "fake"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["setting"] for row in rows] == list(SETTINGS)
    for task in ("passkey", "code"):
        num_read = {row["setting"]: row["answers"][task][0]["num_read"] for row in rows}
        assert num_read.pop("snapstream") == num_read.pop("whole") > num_read.pop("both")
        assert max(num_read.values()) < 0.7 * rows[0]["answers"][task][0]["num_read"]
        kept = {row["setting"]: row["answers"][task][0]["kept"] for row in rows}
        assert kept["whole"] == kept["snapstream"] == 1
        assert set(kept.values()) <= {0, 1}
        assert kept["newest"] == (task == "code"), "only this fact is in the second half"
    assert capsys.readouterr().out.count("\n") == 2 + len(SETTINGS)


def test_a_prompt_that_is_too_short_for_a_task_ends_with_a_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = str(DEMO_MODEL)
    assert main(["--model", model, "--draft", model, "--length", "128", "--tasks", "kv_lookup"]) == 1
    assert "bench.speculative_prefill: kv_lookup needs at least" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--model", model, "--draft", model, "--length", "127"])
    assert "--length must be at least 128" in capsys.readouterr().err


def test_a_case_in_prose_is_text_question_and_the_first_words_of_an_answer() -> None:
    plan = Plan(str(DEMO_MODEL), str(DEMO_MODEL), 600, 2, ("code",), (), ())
    first, second = write_cases(plan, Tokenizer.load(str(DEMO_MODEL)))["code"]
    assert first.references[0] in first.context
    assert first.context != second.context
    assert first.prompt.index("\n\nQuestion: ") < first.prompt.index("\nAnswer: ")
