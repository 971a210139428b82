"""Policy sparse: how near it is to the whole cache, and which models and settings it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
from cache.low_bits import rotate
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from tests.backends.checkpoints import load_oracle, save_checkpoint
from tests.backends.driver import GREEDY, Driver, Request, open_backend
from tests.backends.oracle import continue_greedily, random_prompt

MAX_MODEL_LEN = 160
ALL = PolicyOptions(PolicyName.SPARSE, num_sink=2, num_recent=14, num_attended=MAX_MODEL_LEN)
GEMMA_LAYERS = ["sliding_attention", "full_attention"]
OBSERVED = replace(GREEDY, num_logprobs=20)


def distances(path: Path, policy: PolicyOptions, prompt: list[int]) -> list[float]:
    """Return by how much the log-probabilities of each step differ from the model's own, at most."""
    expected = continue_greedily(load_oracle(path), prompt, 20)
    driver = Driver(open_backend(path, policy, MAX_MODEL_LEN), chunk=32)
    request = Request(prompt, sampling=OBSERVED)
    driver.read(request)
    found = []
    for step, token_id in enumerate(expected.tokens):
        logprobs = expected.logits[step].log_softmax(-1)
        token = request.outputs[0][step]
        found.append(max(abs(value - float(logprobs[each])) for each, value in token.top_logprobs))
        request.outputs[0][step] = replace(token, token_id=token_id)
        driver.decode(request)
    return found[1:]  # prefill drew the first


@pytest.mark.parametrize(
    ("architecture", "most"),
    # The experts of DeepSeek V3 are chosen by value: rounding may change the choice.
    [("llama", 0.25), ("qwen3", 0.25), ("gemma3", 0.25), ("deepseek-v3", 0.35), ("kimi-linear", 0.25)],
)
def test_attending_to_all_differs_from_full_by_rounding_alone(
    tmp_path: Path, architecture: str, most: float
) -> None:
    path = save_checkpoint(architecture, tmp_path, seed=1)
    prompt = random_prompt(120)
    all_errors = distances(path, ALL, prompt)
    few_errors = distances(path, replace(ALL, num_attended=8), prompt)
    lost = distances(path, PolicyOptions(PolicyName.STREAMING_LLM, num_sink=2, num_recent=14), prompt)
    assert 0 < sum(all_errors) < sum(few_errors) < sum(lost)
    assert sum(all_errors) < most * sum(lost)


@pytest.mark.long
def test_compiled_steps_choose_the_same_tokens(tmp_path: Path, compile_cache: Path) -> None:
    """But for the query, which the kernel rounds to 8 bits. Two pools differ in a number of the graph."""
    config = TorchBackendConfig(
        # One layer with a window and one without: each takes long to compile.
        str(save_checkpoint("gemma3", tmp_path, seed=1, num_hidden_layers=2, layer_types=GEMMA_LAYERS)),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        pools=(PoolOptions(4, replace(ALL, num_attended=8), "few"), PoolOptions(4, ALL, "all")),
        max_model_len=MAX_MODEL_LEN,
        prefill_chunk=32,
        compile_cache=compile_cache,
    )
    plain, compiled = (TorchBackend(replace(config, compile=is_compiled)) for is_compiled in (False, True))
    assert compiled.compiled is not None
    compiled.warmup()
    compiled.compiled.wait()
    assert all(step.are_used for step in compiled.compiled.steps)
    for pool in range(2):
        requests = [Request(random_prompt(100, seed=4), sampling=OBSERVED) for _ in range(2)]
        for request, backend in zip(requests, (plain, compiled), strict=True):
            Driver(backend, 32, pool).run(request, num_tokens=3)
        [expected], [found] = (request.outputs for request in requests)
        for token, other in zip(expected, found, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=0.2)


@pytest.mark.parametrize(
    ("architecture", "num_recent", "num_tokens"),
    # Gemma 2's window of 11 tokens lets a prompt of 21 be read in a scratch, though the ring has room for it.
    [("llama", 14, 100), ("llama", 40, 30), ("llama", 14, 17), ("gemma2", 60, 21)],
)
def test_keys_are_stored_less_the_mean_of_the_prompts(
    tmp_path: Path, architecture: str, num_recent: int, num_tokens: int
) -> None:
    """The mean is that of all keys behind the sinks, stored or not. Each choice has it."""
    policy = replace(ALL, num_recent=num_recent)
    backend = open_backend(save_checkpoint(architecture, tmp_path), policy, MAX_MODEL_LEN)
    Driver(backend, chunk=32).read(Request(random_prompt(num_tokens), slots=(2, 0)))
    is_direct = num_tokens <= backend.pools[0].spec.max_direct_tokens
    stores = [(layer, layer.slots.store) for layer in backend.pools[0].cache.layers if layer.slots.store]
    assert stores
    for layer, store in stores:
        read = layer.slots.planes[0][2] if is_direct else layer.scratch.planes[0][0]
        expected = rotate(read[:, 2:num_tokens].mean(1))
        if num_tokens < 18:
            expected = torch.zeros_like(expected)
        assert expected.any() == (num_tokens >= 18)
        assert store.centres[2].equal(expected)
        assert store.centres[0].equal(store.centres[2])
        assert not store.centres[1].any()


def test_a_step_after_the_last_token_that_fits_harms_no_one(tmp_path: Path) -> None:
    """A launch may run past a sequence's end, where the store has no room."""
    backend = open_backend(save_checkpoint("llama", tmp_path), replace(ALL, slot_capacity=40), MAX_MODEL_LEN)
    driver = Driver(backend, chunk=32)
    neighbour, alone = (Request(random_prompt(30, seed=2), slots=(1,), sampling=OBSERVED) for _ in range(2))
    longest = Request(random_prompt(36, seed=3), slots=(0,))
    driver.run(alone, num_tokens=9)
    driver.read(longest, neighbour)
    driver.decode(longest, neighbour, num_steps=8, steps_a_launch=8)
    assert neighbour.outputs == alone.outputs


def refused(path: Path, message: str, **options: object) -> None:
    config = TorchBackendConfig(
        str(path),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        pools=(PoolOptions(2, ALL),),
        max_model_len=64,
    )
    with pytest.raises(ValueError, match=message):
        TorchBackend(replace(config, **options))  # type: ignore[arg-type]


def test_a_model_with_an_indexer_is_refused(tmp_path: Path) -> None:
    refused(
        save_checkpoint("deepseek-v32", tmp_path),
        "policy sparse is not for deepseek_v32: its own indexer chooses entries",
    )


def test_a_bounded_scratch_is_refused(tmp_path: Path) -> None:
    refused(
        save_checkpoint("llama", tmp_path),
        "scratch_capacity is not an option of policy sparse",
        scratch_capacity=40,
    )
