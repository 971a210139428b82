"""Tests of the kvpress driver. A program with the worker's protocol stands in for kvpress."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fidelity.presses import Kvpress, NamedSetting, compression_ratio
from bench.systems.system import MeasurementError
from commands.eval.options import Pack
from commands.eval.prompts import Prompt, PromptWriter, load_tokenizer
from commands.eval.tasks.suite import TASKS
from server.options.models import DEMO_MODEL

# Answers with the prompt's last tokens, and reports how many entries kvpress would hold.
ECHO = """
import json, sys
job = json.load(open(sys.argv[1]))
print(json.dumps({"press": job["press"], "versions": ["kvpress 0"]}))
for prompt in job["prompts"]:
    num_kept = int(prompt["num_prefill_tokens"] * (1 - prompt["compression_ratio"]))
    print(json.dumps({"token_ids": prompt["token_ids"][prompt["num_prefill_tokens"]:], "entries": num_kept}))
"""
TOKENIZER = load_tokenizer(str(DEMO_MODEL))


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    writer = PromptWriter(TOKENIZER, 512, Pack.BEFORE_QUESTION, uses_chat_template=False)
    return [writer.write(TASKS["passkey"], 3, index) for index in range(2)]


def kvpress(folder: Path, source: str) -> Kvpress:
    program = folder / "worker.py"
    program.write_text(source)
    return Kvpress(sys.executable, "model", worker=(str(program),))


@given(st.integers(1, 200_000), st.data())
def test_ratio_makes_kvpress_keep_as_many_entries_as_a_slot(num_read: int, data: st.DataObject) -> None:
    num_entries = data.draw(st.integers(1, num_read))
    assert int(num_read * (1 - compression_ratio(num_read, num_entries))) == num_entries


def test_job_has_every_prompt_with_its_budget(tmp_path: Path, prompts: list[Prompt]) -> None:
    header, *answers = kvpress(tmp_path, ECHO).answers("SnapKV", prompts, 128, title="", reports_entries=True)
    assert header == {"press": "SnapKV", "versions": ["kvpress 0"]}
    assert [answer["entries"] for answer in answers] == [128, 128]


def test_answers_are_scored_like_ours(tmp_path: Path, prompts: list[Prompt]) -> None:
    run = kvpress(tmp_path, ECHO).run(
        NamedSetting("kvpress SnapKV", 4.0), "SnapKV", {"passkey": prompts}, TOKENIZER, 512
    )
    assert run.options == ("SnapKV", "kvpress 0")
    assert (run.setting.label, run.tasks["passkey"].scores) == ("kvpress SnapKV 4x", (0.0, 0.0))
    assert "pass key" in run.tasks["passkey"].example["answer"]
    expected = prompts[0].case.answer
    right = ECHO.replace(
        'prompt["token_ids"][prompt["num_prefill_tokens"]:]',
        str(list(TOKENIZER.encode(expected, add_special_tokens=False))),
    )
    setting = NamedSetting("none", None)
    run = kvpress(tmp_path, right).run(setting, None, {"passkey": prompts}, TOKENIZER, 512)
    assert run.tasks["passkey"].scores[0] == 100


@pytest.mark.parametrize("source", ["raise SystemExit('no kvpress here')", "print('{}')"])
def test_worker_that_fails_or_prints_too_few_lines_raises(
    tmp_path: Path, prompts: list[Prompt], source: str
) -> None:
    with pytest.raises(MeasurementError, match=r"after \d of 3 lines"):
        list(kvpress(tmp_path, source).answers(None, prompts, None, title=""))


def test_missing_python_raises(prompts: list[Prompt]) -> None:
    with pytest.raises(MeasurementError, match="no/python"):
        list(Kvpress("no/python", "model").answers(None, prompts, None, title=""))
