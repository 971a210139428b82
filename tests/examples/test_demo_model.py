"""Tests of the demo model: tokenizer, template, corpus, training, and the answers of the shipped weights."""

import json
import random
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commands.eval.tasks import words
from examples.demo_model import corpus
from examples.demo_model.batches import Writer
from examples.demo_model.corpus import Difficulty, make_case
from examples.demo_model.evaluate import Evaluator
from examples.demo_model.stages import STAGES
from examples.demo_model.tokenizer import SPECIAL_TOKENS, build_tokenizer, single_tokens
from examples.demo_model.train import DemoTrainer
from examples.training.batches import IGNORED
from examples.training.model import hidden_states

SHIPPED = Path(__file__).parents[2] / "server" / "demo_model"
MAX_WEIGHT_BYTES = 12_000_000


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    """The shipped model, loaded."""
    return Evaluator(SHIPPED)


# --- tokenizer and template ---


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_decoding_restores_any_text(evaluator: Evaluator, text: str) -> None:
    ids = evaluator.tokenizer.encode(text, add_special_tokens=False)
    if not any(token in text for token in SPECIAL_TOKENS):
        assert evaluator.tokenizer.decode(ids) == text


HARD_TEXTS = (
    "naïve café",
    "漢字かな",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "\x00\x01\x7f\t\r\n \n\n  x  ",
    "a\u0301 \u202e \ufeff",
    "".join(map(chr, range(256))),
)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_decoding_restores_hard_texts(evaluator: Evaluator, text: str) -> None:
    assert evaluator.tokenizer.decode(evaluator.tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_byte_is_a_token(evaluator: Evaluator) -> None:
    vocabulary = set(evaluator.tokenizer.get_vocab())
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(ByteLevel.alphabet()) <= vocabulary


def test_shipped_tokenizer_equals_the_built_one(evaluator: Evaluator) -> None:
    built = build_tokenizer()
    assert built.get_vocab() == evaluator.tokenizer.get_vocab()
    assert built.chat_template == evaluator.tokenizer.chat_template
    assert all(
        len(evaluator.tokenizer.encode(text, add_special_tokens=False)) == 1 for text in single_tokens()
    )


def test_template_renders_all_roles_and_turns(evaluator: Evaluator) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}]},
    ]
    text = evaluator.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Hello!<|end|><|assistant|>Hi.<|end|>"
        "<|user|>Who are you?<|end|><|assistant|>"
    )
    assert not evaluator.tokenizer.apply_chat_template(messages, tokenize=False).endswith("<|assistant|>")


def test_template_rejects_unknown_roles(evaluator: Evaluator) -> None:
    with pytest.raises(jinja2.exceptions.TemplateError, match="unknown role tool"):
        evaluator.tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


# --- the shipped files ---


def test_shipped_weights_are_small_and_complete(evaluator: Evaluator) -> None:
    assert (SHIPPED / "model.safetensors").stat().st_size <= MAX_WEIGHT_BYTES
    config = json.loads((SHIPPED / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["max_position_embeddings"] >= 8192
    assert config["vocab_size"] == len(evaluator.tokenizer)
    assert evaluator.model.generation_config.eos_token_id == evaluator.tokenizer.eos_token_id


# --- the corpus ---


def count_words(text: str) -> int:
    """Stand in for a tokenizer: lengths add up over sentences, as with the demo model's."""
    return len(text.split())


def named(question: str) -> str:
    """Return the name in a question."""
    return next(word for word in question.strip(".?").split() if word in words.NAMES)


def test_equal_arguments_make_equal_cases() -> None:
    assert make_case(7, 300, count_words) == make_case(7, 300, count_words)
    assert make_case(7, 300, count_words) != make_case(8, 300, count_words)


@pytest.mark.parametrize(("seed", "num_tokens"), [(seed, (40, 300, 2000)[seed % 3]) for seed in range(12)])
def test_fact_in_question_occurs_exactly_once(seed: int, num_tokens: int) -> None:
    case = make_case(seed, num_tokens, count_words)
    assert num_tokens - 20 < count_words(case.document) <= num_tokens
    assert case.document.count(case.statement) == 1
    assert case.answer in case.statement
    name = named(case.question)
    sentences = case.document.replace("\n\n", " ").split(".")
    assert (
        len([sentence for sentence in sentences if f" {name} " in f" {sentence} " and " a " in sentence]) == 1
    )
    assert case.messages == [{"role": "user", "content": f"{case.document}\n\n{case.question}"}]


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_fact_is_at_the_requested_depth(depth: float) -> None:
    for seed in range(10):
        case = make_case(seed, 1000, count_words, depth=depth)
        before = count_words(case.document[: case.document.index(case.statement)])
        assert abs(before / 1000 - depth) < 0.03


def test_fact_is_within_the_requested_last_tokens() -> None:
    for seed in range(20):
        case = make_case(seed, 1000, count_words, within_last=100)
        assert count_words(case.document[case.document.index(case.statement) :]) <= 100


@pytest.mark.parametrize("wrong", [{"depth": 0.5, "within_last": 50}, {"depth": 1.5}, {"within_last": 2}])
def test_impossible_positions_raise(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"^(depth|within_last) is .*: expected"):
        make_case(0, 1000, count_words, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_tokens is 10: expected at least 40"):
        make_case(0, 10, count_words)


def test_training_text_has_no_held_out_pairing() -> None:
    for step in range(50):
        text = corpus.write_training_text(
            corpus.training_stream(0, step), num_facts=100, num_fillers=5, num_questions=100
        )
        for question, value in text.exchanges:
            name = named(question)
            assert not corpus.is_held_out(corpus.Fact(name, value))


def test_held_out_questions_are_about_held_out_pairings() -> None:
    for seed in range(50):
        case = make_case(seed, 100, count_words)
        name = named(case.question)
        assert corpus.is_held_out(corpus.Fact(name, case.answer))


# --- training ---


def test_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    short = replace(STAGES[2], batch_size=1, max_steps=4, target=2.0)
    unbroken = DemoTrainer(3, (short,), tmp_path / "unbroken")
    unbroken.run()
    first = DemoTrainer(3, (replace(short, max_steps=2, final_rate=short.rate),), tmp_path / "broken")
    first.run()
    first.progress.stage, first.progress.step = 0, 2
    first.save()
    second = DemoTrainer(4, (short,), tmp_path / "broken")
    second.seed = 3
    second.restore()
    second.run()
    for name, weight in unbroken.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name
    assert (tmp_path / "broken" / "curve.json").exists()


def test_targets_are_answers_and_first_tokens_begin_them() -> None:
    tokenizer = build_tokenizer()
    batch = Writer(tokenizer).batch(random.Random(0), replace(STAGES[0], batch_size=2))
    learned = batch.targets != IGNORED
    assert (batch.targets[learned] == batch.ids[:, 1:][learned[:, :-1]]).all()
    firsts = {str(tokenizer.decode([int(token)])) for token in batch.targets[batch.is_first]}
    assert firsts <= set(words.ADJECTIVES)
    assert batch.is_first.sum() == 2 * STAGES[0].num_questions


def test_positions_only_skip_ahead() -> None:
    stage = replace(STAGES[0], batch_size=16, max_position=5000, difficulty=Difficulty())
    positions = Writer(build_tokenizer()).batch(random.Random(0), stage).positions
    assert (positions.diff(dim=1) >= 1).all()
    assert 1000 < int(positions.max()) <= 5000


def test_training_forward_equals_the_models(evaluator: Evaluator) -> None:
    ids = torch.tensor(
        [evaluator.tokenizer.encode("Marta keeps a grey falcon. The storm paused near the mill.")]
    )
    with torch.no_grad():
        expected = evaluator.model.model(ids).last_hidden_state
        torch.testing.assert_close(
            hidden_states(evaluator.model, ids, torch.arange(ids.shape[1])[None]), expected
        )


# --- answers ---


def test_model_finds_facts_in_unseen_documents(evaluator: Evaluator) -> None:
    cases = [make_case(seed, 512, evaluator.count_tokens) for seed in range(10_000, 10_024)]
    assert sum(evaluator.is_exact(case) for case in cases) >= 22


def test_model_finds_facts_of_an_earlier_turn(evaluator: Evaluator) -> None:
    exact = 0
    for seed in range(20_000, 20_008):
        case = make_case(seed, 256, evaluator.count_tokens)
        messages = [
            {"role": "user", "content": case.document},
            {"role": "assistant", "content": "I have read the text."},
            {"role": "user", "content": case.question},
        ]
        exact += evaluator.answer(messages) == case.answer
    assert exact >= 7


@pytest.mark.parametrize("message", ["Hello!", "Who are you?", "What can you do?", "Thanks!"])
def test_model_makes_small_talk(evaluator: Evaluator, message: str) -> None:
    assert evaluator.answer([{"role": "user", "content": message}]) == dict(corpus.SMALL_TALK)[message]
