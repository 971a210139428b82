"""A prompt whose beginning is restored gets the same tokens, log-probabilities and slot, bit for bit.

A store in 8 bits alone rounds what is restored.

All chunks are as long as blocks, so that a hit and a cold read have their borders at the same tokens.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.interface import PrefillShape, PromptPooling, SampledToken, SamplingParams
from backends.torch_backend import prefix_store, spec
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, Quantization, TorchBackendConfig
from cache.policy import PolicyName
from cache.policy_options import DEFAULT_SCORERS, PolicyOptions
from cache.pool_options import KVCacheDtype, PoolOptions
from cache.quantization import dequantize, quantize
from cache.scorer import WindowScorer
from scheduler.messages import Final
from tests.backends.checkpoints import save_checkpoint
from tests.backends.oracle import random_prompt
from tests.scheduler.drive import Drive, request

BLOCK = 8
SAMPLED = SamplingParams(
    temperature=0.8, seed=3, num_logprobs=5, repetition_penalty=1.3, frequency_penalty=0.5
)
SNAPSTREAM = PolicyOptions(
    PolicyName.SNAPSTREAM, num_sink=2, num_recent=16, num_kept=13, scorer=WindowScorer(4, pooling_size=3)
)
POLICIES = {
    "full": PolicyOptions(PolicyName.FULL),
    "snapstream": SNAPSTREAM,
    "default scorer": replace(
        SNAPSTREAM,
        scorer=replace(DEFAULT_SCORERS[PolicyName.SNAPSTREAM], observation_window=12, num_echoed=3),
    ),
    "streaming-llm": PolicyOptions(PolicyName.STREAMING_LLM, num_sink=2, num_recent=29),
    "snapkv": PolicyOptions(
        PolicyName.SNAPKV, num_recent=26, num_kept=5, scorer=WindowScorer(4, pooling_size=3)
    ),
    "sparse": PolicyOptions(PolicyName.SPARSE, num_sink=2, num_recent=29, num_attended=20),
}


@dataclass(frozen=True)
class Answer:
    """What a client and the slot have at the end."""

    final: Final
    tokens: list[list[SampledToken]]
    embedding: tuple[float, ...]
    contents: list[Tensor]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(spec, "prefill_shapes", lambda _config, _max_model_len: (PrefillShape(1, BLOCK),))


def open_drive(
    folder: Path,
    policy: PolicyOptions,
    architecture: str = "llama",
    *,
    dtype: DtypeName = DtypeName.FLOAT32,
    quantization: Quantization = Quantization.NONE,
    scratch_capacity: int | None = None,
    prefix_cache_bytes: int = 1 << 20,
    prefix_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
    device: DeviceName = DeviceName.CPU,
) -> Drive:
    config = TorchBackendConfig(
        str(save_checkpoint(architecture, folder)),
        device=device,
        dtype=dtype,
        quantization=quantization,
        pools=(PoolOptions(2, policy, kv_cache_dtype=kv_cache_dtype),),
        max_model_len=256,
        prefill_chunk=BLOCK,
        scratch_capacity=scratch_capacity,
        prefix_cache_bytes=prefix_cache_bytes,
        prefix_cache_dtype=prefix_cache_dtype,
    )
    return Drive(backend=TorchBackend(config))


def ask(drive: Drive, name: str, prompt: tuple[int, ...], **options: Any) -> Answer:
    """Answer one request, and return what it left in the slots."""
    add = request(name, prompt_token_ids=prompt, **{"sampling": SAMPLED, "max_tokens": 4, **options})
    drive.run(add)
    assert isinstance(drive.backend, TorchBackend)
    caches = [layer.slots for layer in drive.backend.pools[0].cache.layers]
    tokens = [
        [token for output in drive.outputs[name, choice] for token in output.tokens]
        for choice in range(add.num_choices)
    ]
    return Answer(
        drive.final(name),
        tokens,
        drive.outputs[name, 0][-1].embedding,
        [plane[:, :, : cache.spare_entry].clone() for cache in caches for plane in cache.planes]
        + [cache.kept_index.clone() for cache in caches],
    )


def check_hit(drive: Drive, prompt: tuple[int, ...], num_cached: int, **options: Any) -> None:
    """Ask twice: the second answer restores `num_cached` tokens, and is the first one."""
    cold = ask(drive, "cold", prompt, **options)
    hit = ask(drive, "hit", prompt, **options)
    assert (cold.final.num_cached_tokens, hit.final.num_cached_tokens) == (0, num_cached)
    assert cold.final.message is None
    assert hit.tokens == cold.tokens
    assert hit.embedding == cold.embedding
    assert all(torch.equal(a, b) for a, b in zip(hit.contents, cold.contents, strict=True))


def check_rounded_hit(drive: Drive, prompt: tuple[int, ...], num_cached: int, kind: KVCacheDtype) -> None:
    """Ask twice: the second slot has the first one's keys and values, but for what the store rounds."""
    cold, hit = (ask(drive, name, prompt, max_tokens=1) for name in ("cold", "hit"))
    assert (cold.final.num_cached_tokens, hit.final.num_cached_tokens) == (0, num_cached)
    assert isinstance(drive.backend, TorchBackend)
    caches = [layer.slots for layer in drive.backend.pools[0].cache.layers]
    pairs = list(zip(hit.contents, cold.contents, strict=True))[: -len(caches)]  # without the kept indices
    for index, (restored, exact) in enumerate(pairs):
        rounded = dequantize(*quantize(exact, kind), exact.dtype, kind)
        assert (restored - exact).norm() <= 0.05 * exact.norm()
        if index < len(caches[0].planes):  # the first layer's depend on no other token
            is_rounded = (restored == rounded).all(-1) & (rounded != exact).any(-1)
            assert (is_rounded | (restored == exact).all(-1)).all()
            assert is_rounded.any()
            assert not is_rounded.all()


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random_prompt(length, seed=seed))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("length", "is_packed"), [(31, False), (60, True)])
def test_every_policy(tmp_path: Path, policy: str, length: int, *, is_packed: bool) -> None:
    drive = open_drive(tmp_path, POLICIES[policy])
    window = {"snapstream": 4, "default scorer": 12, "snapkv": 4}.get(policy, 1) if is_packed else 1
    if policy == "snapkv" and not is_packed:
        length = 9  # its slots hold no more of a prompt
    num_cached = (length - window) // BLOCK * BLOCK
    check_hit(drive, prompt_of(length), num_cached)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gemma2", "gemma3", "deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize("length", [11, 60])
def test_every_kind_of_attention(tmp_path: Path, architecture: str, length: int) -> None:
    """Prompts of 11 tokens fit the sliding windows, too."""
    drive = open_drive(tmp_path, SNAPSTREAM, architecture)
    check_hit(drive, prompt_of(length), 8 if length == 11 else 56)


@pytest.mark.parametrize("quantization", Quantization)
def test_quantised_weights(tmp_path: Path, quantization: Quantization) -> None:
    drive = open_drive(tmp_path, SNAPSTREAM, dtype=DtypeName.BFLOAT16, quantization=quantization)
    check_hit(drive, prompt_of(60), 56)


@pytest.mark.parametrize(("length", "num_cached"), [(18, 0), (31, 24), (60, 56)])
def test_slots_in_8_bits(tmp_path: Path, length: int, num_cached: int) -> None:
    """Only prompts that are read in a scratch are stored: exactly, and for a slot of any pool."""
    drive = open_drive(tmp_path, SNAPSTREAM, kv_cache_dtype=KVCacheDtype.INT8)
    check_hit(drive, prompt_of(length), num_cached)


@pytest.mark.parametrize("kind", [KVCacheDtype.INT8, KVCacheDtype.FP8])
@pytest.mark.parametrize(("length", "num_cached"), [(31, 24), (60, 56)], ids=["slot", "scratch"])
def test_a_store_in_8_bits(tmp_path: Path, length: int, num_cached: int, kind: KVCacheDtype) -> None:
    drive = open_drive(tmp_path, POLICIES["streaming-llm"], prefix_cache_dtype=kind)
    check_rounded_hit(drive, prompt_of(length), num_cached, kind)


def test_a_prompt_that_finds_nothing_in_8_bits_is_exact(tmp_path: Path) -> None:
    answers = [
        ask(open_drive(tmp_path, SNAPSTREAM, prefix_cache_dtype=kind), "cold", prompt_of(60)).tokens
        for kind in (KVCacheDtype.AUTO, KVCacheDtype.INT8)
    ]
    assert answers[0] == answers[1]


def test_an_answer_in_8_bits_is_stored(tmp_path: Path) -> None:
    """What decode wrote into a slot is rounded, too."""
    drive = open_drive(tmp_path, PolicyOptions(PolicyName.FULL), prefix_cache_dtype=KVCacheDtype.INT8)
    first = ask(drive, "first", prompt_of(10), max_tokens=23)
    history = (*prompt_of(10), *(token.token_id for token in first.tokens[0]))
    second = ask(drive, "second", (*history, *prompt_of(10, seed=1)))
    assert second.final.num_cached_tokens == 32
    before, after = (answer.contents[0][0, :, :32] for answer in (first, second))
    assert torch.equal(after, dequantize(*quantize(before), before.dtype))


def test_8_bits_store_more_blocks(tmp_path: Path) -> None:
    blocks = []
    for kind in KVCacheDtype:
        drive = open_drive(tmp_path, SNAPSTREAM, prefix_cache_dtype=kind)
        assert drive.spec.prefixes is not None
        assert isinstance(drive.backend, TorchBackend)
        assert drive.backend.prefixes is not None
        num_bytes = drive.spec.prefixes.num_blocks * drive.spec.prefixes.block_bytes
        assert drive.backend.prefixes.num_bytes == num_bytes <= 1 << 20
        blocks.append(drive.spec.prefixes.num_blocks)
    # A row of 16 float32 values has 64 bytes. In 8 bits it has 16, and 2 of its scale.
    assert blocks[1] == blocks[2] == pytest.approx(64 / 18 * blocks[0], rel=0.01)


def test_latents_in_8_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prefix_cache_dtype must be auto for a model that caches latents"):
        open_drive(tmp_path, SNAPSTREAM, "deepseek-v2", prefix_cache_dtype=KVCacheDtype.INT8)


@pytest.mark.parametrize(("length", "num_cached"), [(40, 32), (183, 32)])
def test_a_scratch_that_evicts(tmp_path: Path, length: int, num_cached: int) -> None:
    """Only what was read before the first eviction is restored."""
    policy = replace(SNAPSTREAM, num_recent=8, num_kept=5)
    drive = open_drive(tmp_path, policy, scratch_capacity=40)
    check_hit(drive, prompt_of(length), num_cached)


def test_several_choices(tmp_path: Path) -> None:
    check_hit(open_drive(tmp_path, SNAPSTREAM), prompt_of(60), 56, num_choices=2)


def test_the_last_hidden_state(tmp_path: Path) -> None:
    drive = open_drive(tmp_path, SNAPSTREAM)
    check_hit(drive, prompt_of(60), 56, max_tokens=0, pooling=PromptPooling.LAST)
    assert any(drive.outputs["hit", 0][-1].embedding)


def test_a_prompt_goes_on_differently(tmp_path: Path) -> None:
    """The answer to a prompt that shares a beginning is that of a server that stores nothing."""
    drive = open_drive(tmp_path, SNAPSTREAM)
    cold = open_drive(tmp_path, SNAPSTREAM, prefix_cache_bytes=0)
    shared = prompt_of(44)
    ask(drive, "first", (*shared, *prompt_of(20, seed=1)))
    prompt = (*shared, *prompt_of(30, seed=2))
    hit = ask(drive, "hit", prompt)
    assert hit.final.num_cached_tokens == 40
    assert hit.tokens == ask(cold, "cold", prompt).tokens
    again = ask(drive, "again", prompt)
    assert again.final.num_cached_tokens == 64  # the first prompt's other blocks are between them
    assert again.tokens == hit.tokens


@pytest.mark.parametrize("architecture", ["llama", "deepseek-v2"])
def test_an_answer_is_stored_as_it_was_written(tmp_path: Path, architecture: str) -> None:
    """The next turn's slot has the keys and values that decode wrote for the answer."""
    drive = open_drive(tmp_path, PolicyOptions(PolicyName.FULL), architecture)
    first = ask(drive, "first", prompt_of(10), max_tokens=23)
    history = (*prompt_of(10), *(token.token_id for token in first.tokens[0]))
    second = ask(drive, "second", (*history, *prompt_of(10, seed=1)))
    assert second.final.num_cached_tokens == 32
    assert isinstance(drive.backend, TorchBackend)
    num_planes = len(first.contents) - len(drive.backend.pools[0].cache.layers)
    for before, after in zip(first.contents[:num_planes], second.contents[:num_planes], strict=True):
        assert torch.equal(before[0, :, :32], after[0, :, :32])


def test_the_store_has_the_bytes_that_it_may_have(tmp_path: Path) -> None:
    drive = open_drive(tmp_path, SNAPSTREAM, prefix_cache_bytes=100_000)
    prefixes = drive.spec.prefixes
    assert prefixes is not None
    assert isinstance(drive.backend, TorchBackend)
    assert drive.backend.prefixes is not None
    assert drive.backend.prefixes.num_bytes == prefixes.num_blocks * prefixes.block_bytes <= 100_000
    assert drive.backend.prefixes.num_bytes + prefixes.block_bytes > 100_000
    assert drive.spec.description.endswith(", 0 MB for stored prompts")
    for seed in range(8):
        ask(drive, f"r{seed}", prompt_of(60, seed))
    stats = drive.scheduler.stats().prefixes
    assert stats.num_blocks == prefixes.num_blocks
    assert stats.num_evicted_blocks > 0
