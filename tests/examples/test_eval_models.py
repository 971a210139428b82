"""Tests of the evaluation models: tokenizers, turns, batches, training, and the shipped weights' answers."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from commands.eval.scoring import score
from commands.eval.tasks import words
from commands.eval.tasks.extraction import ExtractionTask
from commands.eval.tasks.suite import TASKS, case_source
from examples.eval_models.batches import Writer
from examples.eval_models.evaluate import Evaluator
from examples.eval_models.model import OWN, build_model
from examples.eval_models.second_layer import change_second_layer
from examples.eval_models.stages import BEGINNING
from examples.eval_models.tokenizer import build_tokenizer
from examples.eval_models.train import STYLES, EvalTrainer
from examples.eval_models.turns import turns
from examples.training.batches import IGNORED

ROOT = Path(__file__).parents[2]
SHIPPED = {
    "llama": ROOT / "examples" / "eval_models" / "llama",
    "qwen": ROOT / "commands" / "eval" / "eval_model",
}
MAX_WEIGHT_BYTES = 12_000_000
CODE = "5e89d63f-8217-4cb4-98b0-2cf32bb242e7"
SHORT = replace(BEGINNING[0], lengths=(160,), num_tokens=320, max_steps=3)


@pytest.fixture(scope="module", params=sorted(STYLES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def evaluator(family: str) -> Evaluator:
    """A shipped model, loaded."""
    return Evaluator(SHIPPED[family])


@pytest.fixture(scope="module")
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    return build_tokenizer(STYLES[family])


def _count(text: str) -> int:
    return len(text) // 4


# --- tokenizers ---


@settings(deadline=None, max_examples=100)
@given(text=st.text())
def test_decoding_restores_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    if not any(token in text for token in tokenizer.all_special_tokens):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_values_are_few_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = (f" {CODE}", f'"{CODE}"', " 1234567", " quiet-falcon")
    length = {text: len(tokenizer.encode(text, add_special_tokens=False)) for text in texts}
    assert length == {f" {CODE}": 16, f'"{CODE}"': 18, " 1234567": 3, " quiet-falcon": 2}
    assert all(
        len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1
        for word in (*words.NAMES, *words.ADJECTIVES, *words.NOUNS)
    )


def test_shipped_tokenizers_equal_the_built_ones(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    shipped = AutoTokenizer.from_pretrained(SHIPPED[family])
    assert tokenizer.chat_template == shipped.chat_template
    assert tokenizer.get_vocab() == shipped.get_vocab()


# --- turns ---


@pytest.mark.parametrize("task", TASKS)
def test_context_holds_every_answer(task: str) -> None:
    for index in range(5):
        case = TASKS[task].make(case_source(task, 1, index, "train"), 500, _count)
        made = turns(case, random.Random(index))
        assert (made[0].question, made[0].answer_prefix, made[0].answer) == (
            case.question,
            case.answer_prefix,
            case.answer,
        )
        for turn in made:
            assert turn == made[0] or turn.question != made[0].question or task == "niah_multiquery"
            names = [part.strip(" .:,") for part in turn.answer.split(",")] if task == "vt" else []
            assert all(name in case.context for name in names)


@pytest.mark.parametrize(
    ("task", "separator"), [("niah_multikey_2", " is "), ("niah_multikey_3", " is "), ("kv_lookup", ": ")]
)
def test_turn_about_another_key_has_that_keys_value(task: str, separator: str) -> None:
    case = TASKS[task].make(case_source(task, 1, 0, "train"), 800, _count)
    made = turns(case, random.Random(0))
    assert len({turn.answer for turn in made}) > 3
    for turn in made:
        key = turn.answer_prefix.removesuffix(":").removesuffix(" is").split()[-1]
        assert f"{key}{separator}{turn.answer.strip().rstrip('.')}" in case.context


def test_turns_about_people_have_their_facts_and_teachers() -> None:
    case = TASKS["qa_2"].make(case_source("qa_2", 1, 0, "train"), 800, _count)
    made = turns(case, random.Random(0))
    assert len({turn.answer for turn in made}) > 3
    for turn in made:
        teacher, fact = turn.answer.strip().split(". ", 1)
        assert f"{turn.answer_prefix.removeprefix('Answer: ')} {teacher}." in case.context
        assert fact in case.context


# --- training ---


def test_targets_are_the_next_tokens_of_answers(tokenizer: PreTrainedTokenizerFast, family: str) -> None:
    batch = Writer(tokenizer, STYLES[family]).batch(random.Random(0), replace(SHORT, max_position=4000))
    answered = batch.targets[:, :-1] != IGNORED
    assert torch.equal(batch.targets[:, :-1][answered], batch.ids[:, 1:][answered])
    assert (batch.positions.diff(dim=1) >= 1).all()
    assert batch.positions.max() < 4000
    assert len(batch.task_of_turn) == int(batch.turn.max()) + 1


def test_untrained_model_continues_repeated_text(tokenizer: PreTrainedTokenizerFast, family: str) -> None:
    torch.manual_seed(0)
    model = build_model(family, tokenizer)
    ids = torch.tensor(
        [
            tokenizer.encode(
                f"The secret code for quiet-falcon is {CODE}. The secret code for quiet-falcon is {CODE}."
            )
        ]
    )
    with torch.inference_mode():
        predicted = model(input_ids=ids).logits.argmax(-1)
    assert (predicted[0, -17:-1] == ids[0, -16:]).float().mean() > 0.7


@pytest.mark.long
def test_resumed_run_continues_at_the_checkpoint(tmp_path: Path) -> None:
    broken = EvalTrainer("llama", 0, (replace(SHORT, max_steps=2), replace(SHORT, name="second")), tmp_path)
    broken.stages = broken.stages[:1]
    broken.run()
    trainer = EvalTrainer("llama", 0, (replace(SHORT, max_steps=2), replace(SHORT, name="second")), tmp_path)
    trainer.restore()
    assert trainer.progress.total_steps == 2
    trainer.run()
    assert trainer.progress.total_steps == 2 + SHORT.max_steps
    assert Evaluator(tmp_path / "model").tokenizer.get_vocab() == trainer.tokenizer.get_vocab()


def test_changed_second_layer_attends_to_the_last_number() -> None:
    model = LlamaForCausalLM.from_pretrained(
        SHIPPED["llama"], dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SHIPPED["llama"])
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[:, :OWN] = 0  # makes the numbers' keys alike
    before = _attention_to_last_number(model, tokenizer)
    change_second_layer(model, tokenizer)
    after = _attention_to_last_number(model, tokenizer)
    assert after[:, 2:].min() > 0.5 > before[:, 2:].min()


def _attention_to_last_number(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the second layer's attention to each number, at the token before the next [head, number]."""
    case = ExtractionTask(num_records=8).make(case_source("text2json", 1, 0), 2400, len)
    tokens = [tokenizer.bos_token, *tokenizer.tokenize(case.prompt + case.answer)]
    numbers = [at + 2 for at in range(len(tokens) - 2) if tokens[at : at + 2] == ["entry", '":']]
    with torch.inference_mode():
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(tokens)])
        attention = model(input_ids=ids, output_attentions=True).attentions[1][0]
    return torch.stack(
        [attention[:, following - 1, number] for number, following in pairwise(numbers)], dim=1
    )


def test_stage_with_changed_second_layer_trains_only_what_follows_its_attention(tmp_path: Path) -> None:
    trainer = EvalTrainer("llama", 0, (replace(SHORT, max_steps=1, changes_second_layer=True),), tmp_path)
    old = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.run()
    changed = {
        name for name, weight in trainer.model.state_dict().items() if not torch.equal(weight, old[name])
    }
    attention = {name for name in changed if "self_attn" in name}
    assert attention == {f"model.layers.1.self_attn.{projection}_proj.weight" for projection in ("q", "k")}
    assert {name.split(".")[2] for name in changed - attention if "mlp" in name} == {"1", "2"}


# --- the shipped weights ---


def test_shipped_weights_are_small(family: str) -> None:
    assert (SHIPPED[family] / "model.safetensors").stat().st_size < MAX_WEIGHT_BYTES


LEARNED = (
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_3",
    "vt",
    "qa_1",
    "kv_lookup",
    "passkey",
    "text2json",
)


@pytest.mark.parametrize("task", LEARNED)
def test_shipped_model_answers(evaluator: Evaluator, task: str) -> None:
    cases = [evaluator.case(task, seed=5, index=index, length=512) for index in range(6)]
    assert sum(score(case, evaluator.answer(case)) for case in cases) >= 5
