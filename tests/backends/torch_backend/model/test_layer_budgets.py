"""Layers that keep different numbers of tokens: their budgets, and slots equal to the plain reference's.

Only a trained model has layers that differ: the evaluation model. One of its three layers looks things up,
and the last one rests on the first token where it finds nothing.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, Quantization, TorchBackendConfig
from backends.torch_backend.model.attention import ATTENTION_NAME, register_attention
from backends.torch_backend.model.fingerprint import sampled_fingerprint
from backends.torch_backend.model.induction import InductionScore, induction_scores, measure_induction
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.spec import layer_kinds, most_slot_entries, with_layer_budgets
from cache.policy import PolicyName
from cache.policy_options import LayerBudgets, PolicyOptions
from cache.pool_options import PoolOptions
from cache.scorer import WindowScorer
from cache.slots import StateSpec
from commands.eval.options import EVAL_MODEL
from tests.backends.checkpoints import save_checkpoint
from tests.backends.contents import assert_same_contents, recipe_of
from tests.backends.driver import GREEDY, Driver, Request
from tests.backends.oracle import assert_same_logprobs
from tests.reference.bounded import Bound, BoundedSequence
from tests.reference.sequence import Sequence, load_reference

S, R, K, CHUNK, NUM_TOP = 2, 8, 8, 8, 20
POLICY = PolicyOptions(
    num_sink=S, num_recent=R, num_kept=K, scorer=WindowScorer(observation_window=4, pooling_size=3)
)
# Around the window, and what the layers that keep 2, 8 and 14 hold; the last outgrow a scratch.
LENGTHS = (11, 12, 13, 18, 19, 24, 25, 65, 90)


def _open(path: Path, policy: PolicyOptions = POLICY, scratch_capacity: int | None = None) -> TorchBackend:
    config = TorchBackendConfig(
        str(path),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        pools=(PoolOptions(len(LENGTHS), policy),),
        max_model_len=128,
        scratch_capacity=scratch_capacity,
        prefill_chunk=4 * CHUNK,
    )
    return TorchBackend(config)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return load_reference(EVAL_MODEL)


@pytest.fixture(params=[(True, None), (False, 64)], ids=str)
def backend(request: pytest.FixtureRequest, shares_votes: bool) -> Iterator[TorchBackend]:
    lend_kept, scratch_capacity = request.param
    backend = _open(
        EVAL_MODEL, replace(POLICY, lend_kept=lend_kept, share_votes=shares_votes), scratch_capacity
    )
    backend.warmup()  # reads a prompt of which there is nothing to choose
    yield backend
    backend.close()


def _prompt(length: int) -> list[int]:
    """Tokens of which some come again, so that there is something to look up."""
    generator = torch.Generator().manual_seed(length)
    words = torch.randint(100, 6000, (length,), generator=generator).tolist()
    return [*words[: length - length // 4], *words[: length // 4]]


@pytest.mark.parametrize("shares_votes", [False, True])
def test_tokens_and_slots_are_the_references(
    backend: TorchBackend, reference: PreTrainedModel, shares_votes: bool
) -> None:
    policy, scratch = backend.spec.pools[0].policy, backend.spec.scratch.layout
    assert (policy.layer_kept, policy.leading_layer) == ((2, 14, 8), 1 if shares_votes else None)
    assert backend.spec.pools[0].policy.max_exact_prompt == S + R + 2
    driver = Driver(backend, chunk=CHUNK)
    for slot, length in enumerate(LENGTHS):
        request = Request(_prompt(length), (slot,), replace(GREEDY, num_logprobs=NUM_TOP))
        driver.run(request, num_tokens=13)
        recipe = recipe_of(policy)
        sequence = Sequence(reference, recipe, request.prompt)
        if length > scratch.max_tokens:
            bound = Bound(scratch.max_tokens, scratch.eviction_size, scratch.num_ahead)
            sequence = BoundedSequence(reference, recipe, request.prompt, bound)
        assert request.tokens == sequence.extend(13), length
        assert_same_logprobs(request.outputs[0], sequence.logits, NUM_TOP)
        assert_same_contents(
            backend, request.slots[0], sequence, is_packed=length > backend.spec.pools[0].max_direct_tokens
        )


def test_equal_budgets_are_not_measured() -> None:
    backend = _open(EVAL_MODEL, replace(POLICY, layer_budgets=LayerBudgets.EQUAL))
    assert backend.spec.pools[0].policy.layer_kept == ()
    assert backend.spec.pools[0].policy.max_exact_prompt == S + R + K


def test_slots_of_unlike_layers_take_no_more_memory() -> None:
    equal, measured = (_open(EVAL_MODEL, replace(POLICY, layer_budgets=budgets)) for budgets in LayerBudgets)
    held = [sum(layer.slots.num_bytes for layer in each.pools[0].cache.layers) for each in (equal, measured)]
    assert held[0] == held[1]


def test_no_layer_outgrows_a_scratch() -> None:
    """Of 24 entries, 20 are the longest slot's: 10 kept tokens beside sinks and ring, the rest is read ahead.

    Others get the rest.
    """
    backend = _open(EVAL_MODEL, scratch_capacity=24)
    assert backend.spec.pools[0].policy.layer_kept == (4, 10, 10)


def test_pools_share_what_a_scratch_fills() -> None:
    """The widest observation window of all is read ahead."""
    wider = replace(POLICY, scorer=WindowScorer(observation_window=6, pooling_size=3))
    policies = [
        policy.resolve(128)
        for policy in (POLICY, wider, PolicyOptions(PolicyName.STREAMING_LLM, num_sink=S, num_recent=R))
    ]
    assert [most_slot_entries(policies, 128, capacity) for capacity in (None, 128, 64)] == [128, 128, 58]
    assert most_slot_entries(policies[2:], 128, 64) == 63


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "deepseek-v2", "deepseek-v3"])
def test_untrained_layers_are_alike(architecture: str, tmp_path: Path) -> None:
    backend = _open(save_checkpoint(architecture, tmp_path))
    assert backend.spec.pools[0].policy.layer_kept == ()


def test_scores_equal_the_models_attention() -> None:
    """Against transformers' own weights of the same tokens; the sequence is shorter than usual."""
    register_attention()
    own, plain = (
        AutoModelForCausalLM.from_pretrained(EVAL_MODEL, dtype=torch.float32, attn_implementation=name)
        for name in (ATTENTION_NAME, "eager")
    )
    num_tokens, vocab_size = 20, plain.config.vocab_size
    once = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        weights = plain(
            torch.tensor([[plain.config.bos_token_id, *once, *once]]), output_attentions=True
        ).attentions
    second = torch.arange(num_tokens + 1, 2 * num_tokens + 1)
    found = [float(layer[0][:, second, second - num_tokens + 1].mean()) for layer in weights]
    rests = [float(layer[0][:, second, 0].mean()) for layer in weights]
    assert found[1] > 0.9
    assert rests[2] > 0.5
    measured = measure_induction(own, 3, max_model_len=41)
    assert [layer.matched for layer in measured] == pytest.approx(found, abs=1e-5)
    assert [layer.sink for layer in measured] == pytest.approx(rests, abs=1e-5)
    assert [layer.total for layer in measured] == pytest.approx(
        [a + 0.75 * b for a, b in zip(found, rests, strict=True)], abs=1e-5
    )
    assert measure_induction(own, 3, max_model_len=4) == [InductionScore(0.0, 0.0)] * 3


def _model() -> PreTrainedModel:
    register_attention()
    return AutoModelForCausalLM.from_pretrained(
        EVAL_MODEL, dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )


def test_a_model_without_a_token_for_beginnings_is_read_too() -> None:
    model = _model()
    model.config.bos_token_id = None
    assert measure_induction(model, 3, max_model_len=40)[1].matched > 0.9


def test_the_layer_with_the_highest_induction_score_leads() -> None:
    layers = [LayerSpec(4, 2, (), None) for _ in range(3)]
    measured = [InductionScore(0.0, 1.0), InductionScore(0.5, 0.0), InductionScore(0.0, 0.0)]
    assert (
        with_layer_budgets(POLICY.resolve(128), layers, measured, 128, 128, has_leader=True).leading_layer
        == 1
    )
    assert (
        with_layer_budgets(POLICY.resolve(128), layers, measured, 128, 128, has_leader=False).leading_layer
        is None
    )


def test_layers_with_states_have_no_share() -> None:
    states = (StateSpec((8, 3), torch.float32),)
    layers = [
        LayerSpec(0, 0, (), None, states=states) if index % 2 == 0 else LayerSpec(4, 2, (), None)
        for index in range(5)
    ]
    measured = [InductionScore(found, 0.0) for found in (1.0, 0.0, 1.0, 0.9, 1.0)]
    policy = with_layer_budgets(POLICY.resolve(128), layers, measured, 128, 128, has_leader=True)
    assert (policy.layer_kept, policy.leading_layer) == ((2, 14), 1)
    kinds = layer_kinds(policy, layers, 128)
    assert [kinds[index].policy.layout.num_kept for index in (1, 3)] == [2, 14]
    assert set(kinds) == {kinds[1], kinds[3]}, "a step has no masks for layers without entries"


def test_layers_with_a_sliding_window_have_no_share() -> None:
    layers = [LayerSpec(4, 2, (), window) for window in (None, 16, None, 16, None)]
    measured = [InductionScore(found, 0.0) for found in (0.0, 1.0, 0.9, 1.0, 0.0)]
    policy = with_layer_budgets(POLICY.resolve(128), layers, measured, 128, 128, has_leader=True)
    assert (policy.layer_kept, policy.leading_layer) == ((2, 20, 2), 1)
    kinds = layer_kinds(policy, layers, 128)
    assert [kind.policy.layout.num_kept for kind in kinds] == [2, 0, 20, 0, 2]
    assert [kind.policy.layout.num_recent for kind in kinds] == [R, 16, R, 16, R]
    assert len(set(kinds)) == 3


def test_scores_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "induction"
    scores = induction_scores(_model(), 3, 40, "weights", cache)
    assert scores == measure_induction(_model(), 3, 40)
    monkeypatch.setattr(PreTrainedModel, "base_model", None)  # it cannot be run
    assert induction_scores(_model(), 3, 40, "weights", cache) == scores
    for num_tokens, weights in ((39, "weights"), (40, "others")):
        with pytest.raises(TypeError, match="not callable"):
            induction_scores(_model(), 3, num_tokens, weights, cache)


def test_each_weight_has_a_name_of_its_own() -> None:
    names = [sampled_fingerprint(_model()), sampled_fingerprint(_model().bfloat16())]
    for name in dict(_model().named_parameters()):
        changed = _model()
        with torch.no_grad():
            changed.get_parameter(name).mul_(1.5)
        names.append(sampled_fingerprint(changed))
    assert len(set(names)) == len(names) > 20
    assert sampled_fingerprint(_model()) == names[0]


def test_a_backend_finds_the_scores_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a name that its linear layers, which it replaces, are part of, and their quantization."""
    monkeypatch.setattr("backends.torch_backend.backend.INDUCTION_CACHE", tmp_path)
    measured = []

    def note(model: PreTrainedModel, num_layers: int, max_model_len: int) -> list[InductionScore]:
        measured.append(model)
        return measure_induction(model, num_layers, max_model_len)

    monkeypatch.setattr("backends.torch_backend.model.induction.measure_induction", note)
    policy = replace(POLICY, layer_budgets=LayerBudgets.MEASURED)
    changed = _model()
    with torch.no_grad():
        changed.get_parameter("model.layers.1.self_attn.q_proj.weight").mul_(0.0)
    for model, quantization, num_measured in (
        (_model(), Quantization.NONE, 1),
        (_model(), Quantization.NONE, 1),
        (_model(), Quantization.INT8, 2),
        (changed, Quantization.NONE, 3),
    ):
        config = TorchBackendConfig(
            str(EVAL_MODEL),
            (PoolOptions(1, policy),),
            max_model_len=64,
            device=DeviceName.CPU,
            quantization=quantization,
        )
        TorchBackend(config, model=model).close()
        assert len(measured) == num_measured
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "content",
    [
        "",
        "7",
        "[[1, 1]]",
        "[[1], [1], [1]]",
        '["11", "10", "01"]',
        "[[NaN, 0], [0, 0], [0, 0]]",
        "[[-0.1, 0], [0, 0], [0, 0]]",
    ],
)
def test_a_broken_file_of_scores_is_written_again(tmp_path: Path, content: str) -> None:
    scores = induction_scores(_model(), 3, 40, "weights", tmp_path)
    (file,) = tmp_path.iterdir()
    written = file.read_text()
    file.write_text(content)
    assert induction_scores(_model(), 3, 40, "weights", tmp_path) == scores
    assert [path.read_text() for path in tmp_path.iterdir()] == [written]


def test_scores_are_measured_where_no_file_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "file"
    file.touch()
    assert induction_scores(_model(), 3, 40, "weights", file) == measure_induction(_model(), 3, 40)
    assert "each start measures them" in caplog.text


def test_a_file_that_cannot_take_its_name_is_deleted(tmp_path: Path) -> None:
    scores = induction_scores(_model(), 3, 40, "weights", tmp_path)
    (file,) = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    assert induction_scores(_model(), 3, 40, "weights", tmp_path) == scores
    assert [*tmp_path.iterdir()] == [file]
