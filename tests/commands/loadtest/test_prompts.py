"""Prompts of a load: lengths, seeds, and files."""

import json
from collections import Counter
from pathlib import Path

import pytest

from commands.loadtest.config import DatasetName, Load
from commands.loadtest.prompts import WordScale, make_prompts
from server.options.command_line import OptionError

LOAD = Load(input_len=100, output_len=20, vocab_size=600)


def test_random_tokens_have_the_requested_length_and_vocabulary() -> None:
    for prompt in make_prompts(LOAD, None, "0", 20):
        assert len(prompt.content) == 100
        assert all(isinstance(token, int) and 256 <= token < 600 for token in prompt.content)
        assert prompt.max_tokens == 20


def test_a_seed_repeats_its_prompts() -> None:
    assert make_prompts(LOAD, None, "1", 5) == make_prompts(LOAD, None, "1", 5)
    assert make_prompts(LOAD, None, "1", 5) == make_prompts(LOAD, None, "1", 9)[:5]


def test_prompts_of_a_run_and_of_other_rounds_have_different_prefixes() -> None:
    prompts = make_prompts(LOAD, None, "1", 50) + make_prompts(LOAD, None, "2", 50)
    assert len({prompt.content[:16] for prompt in prompts}) == 100


def test_lengths_vary_by_the_ratio() -> None:
    prompts = make_prompts(LOAD.model_copy(update={"range_ratio": 0.5}), None, "0", 400)
    lengths, limits = {len(prompt.content) for prompt in prompts}, {prompt.max_tokens for prompt in prompts}
    assert min(lengths) in range(50, 56)
    assert max(lengths) in range(145, 151)
    assert limits == set(range(10, 31))


def test_number_of_words_follows_the_scale() -> None:
    scale = WordScale.through((32, 32 * 2 + 10), (256, 256 * 2 + 10))
    assert scale == WordScale(10, 2)
    (prompt,) = make_prompts(LOAD, scale, "0", 1)
    assert isinstance(prompt.content, str)
    assert len(prompt.content.split()) == 45


REPETITION = LOAD.model_copy(
    update={
        "dataset_name": DatasetName.PREFIX_REPETITION,
        "repeated_len": 30,
        "suffix_len": 7,
        "num_prefixes": 4,
        "repetition_output_len": 9,
    }
)


def test_prompts_of_a_group_share_their_beginning_only() -> None:
    prompts = make_prompts(REPETITION, None, "0", 20)
    assert {(len(prompt.content), prompt.max_tokens) for prompt in prompts} == {(37, 9)}
    assert Counter(Counter(prompt.content[:30] for prompt in prompts).values()) == {5: 4}
    assert len({prompt.content[30:] for prompt in prompts}) == 20
    others = make_prompts(REPETITION, None, "1", 20)
    assert not {prompt.content[:30] for prompt in prompts} & {prompt.content[:30] for prompt in others}


def test_repetitions_of_words_follow_the_scale() -> None:
    prompts = make_prompts(REPETITION, WordScale(10, 2), "0", 8)
    beginnings = Counter(tuple(str(prompt.content).split()[:10]) for prompt in prompts)
    assert sorted(beginnings.values()) == [2, 2, 2, 2]
    assert all(len(str(prompt.content).split()) == 10 + 4 for prompt in prompts), "3.5 is rounded to even"


def test_a_template_longer_than_the_prompt_leaves_one_word() -> None:
    assert WordScale(200, 1.0).num_words(100) == 1


def test_lines_of_a_file_are_shuffled_by_the_seed_and_repeated(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\nthree\n")
    load = LOAD.model_copy(update={"dataset_path": file})
    contents = [prompt.content for prompt in make_prompts(load, None, "0", 6)]
    assert set(contents[:3]) == {"one", "two", "three"}
    assert contents[3:] == contents[:3]
    assert contents == [prompt.content for prompt in make_prompts(load, None, "0", 6)]


def test_prompts_are_read_from_objects_of_a_jsonl_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "other": 1}) + "\n" for text in ("a\nb", "c")))
    assert {
        prompt.content
        for prompt in make_prompts(LOAD.model_copy(update={"dataset_path": file}), None, "0", 2)
    } == {
        "a\nb",
        "c",
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "cannot be read"),
        ("empty.txt", "\n\n", "has no prompt"),
        (
            "bad.jsonl",
            '{"prompt": "a"}\n\n{"text": "b"}\n',
            "bad.jsonl, line 3: not an object with a text `prompt`",
        ),
        ("list.jsonl", "[1]\n", "line 1: not an object"),
    ],
)
def test_a_file_without_prompts_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionError, match=message):
        make_prompts(LOAD.model_copy(update={"dataset_path": file}), None, "0", 1)
