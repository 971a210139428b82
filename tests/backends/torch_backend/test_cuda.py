"""On a CUDA device: the tokens that the CPU draws, from captured steps and from eager ones.

The kernel of prompts does not serve float32, so it is compared alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from backends.interface import PrefillShape
from backends.torch_backend import prefix_store, spec
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, Quantization, TorchBackendConfig
from backends.torch_backend.cuda_graphs import CudaRecorder
from backends.torch_backend.errors import UnsupportedModelError
from backends.torch_backend.model import fused_attention
from backends.torch_backend.model.attention import MASKED, AttentionOptions, grouped_attention
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import KVCacheDtype, PoolOptions
from cache.token_store import TokenStore
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import GREEDY, Driver, Request
from tests.backends.families import FAMILIES, save_tiny, tiny_config
from tests.backends.oracle import random_prompt
from tests.backends.torch_backend.test_cuda_graphs import POLICIES, open_recorded, serve_all, unrecorded
from tests.backends.torch_backend.test_prefix_store import (
    BLOCK,
    SNAPSTREAM,
    check_hit,
    check_rounded_hit,
    open_drive,
    prompt_of,
)
from tests.e2e.process import Server, serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
OBSERVED = replace(GREEDY, num_logprobs=1)


def _check_same(actual: Sequence[Request], expected: Sequence[Request], tolerance: float = 1e-3) -> None:
    """Compare tokens, and log-probabilities in nats: two devices add in different orders."""
    for request, oracle in zip(actual, expected, strict=True):
        assert request.tokens == oracle.tokens
        for token, other in zip(request.outputs[0], oracle.outputs[0], strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=tolerance)


def _open(
    folder: Path,
    device: DeviceName,
    quantization: Quantization = Quantization.NONE,
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
    policy: PolicyOptions = POLICIES["full"],
    *,
    is_captured: bool = False,
) -> TorchBackend:
    backend = TorchBackend(
        TorchBackendConfig(
            str(folder),
            device=device,
            dtype=DtypeName.FLOAT32,
            quantization=quantization,
            pools=(PoolOptions(2, policy, kv_cache_dtype=kv_cache_dtype),),
            max_model_len=256,
            prefill_chunk=32,
            compile=is_captured,
        )
    )
    backend.warmup()
    return backend


def _continue(backend: TorchBackend, *lengths: int) -> list[Request]:
    requests = [
        Request(random_prompt(length), slots=(slot,), sampling=OBSERVED)
        for slot, length in enumerate(lengths)
    ]
    Driver(backend, 32).run(*requests, num_tokens=13, steps_a_launch=4)
    return requests


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        *(("llama", policy) for policy in POLICIES),
        *((model, "snapstream") for model in ("gemma2", "lfm2", "falcon-h1", "qwen3-next")),
        *((model, "sparse") for model in ("gemma2", "deepseek-v3", "lfm2")),
    ],
)
def test_captured_steps_draw_what_the_cpu_draws(
    model: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(save_checkpoint(model, tmp_path))
    recorder = CudaRecorder(torch.device("cuda"))
    captured = open_recorded(path, POLICIES[policy], recorder, DeviceName.CUDA)
    assert captured.num_recorded > 0
    monkeypatch.setattr(captured, "_decode_unrecorded", None)
    _check_same(serve_all(captured), serve_all(open_recorded(path, POLICIES[policy], unrecorded)))


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2"])
def test_experts_in_bfloat16_are_captured(model: str, tmp_path: Path) -> None:
    """torch sends the experts' offsets to the host for float32, and for bfloat16 it does not."""
    path = str(save_checkpoint(model, tmp_path))
    options = POLICIES["snapstream"], CudaRecorder(torch.device("cuda")), DeviceName.CUDA, DtypeName.BFLOAT16
    captured = open_recorded(path, *options)
    assert captured.num_recorded > 0
    assert all(len(request.tokens) > 10 for request in serve_all(captured))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_type_of_model(model_type: str, tmp_path: Path) -> None:
    save_tiny(tiny_config(model_type), tmp_path)
    try:
        oracle = _open(tmp_path, DeviceName.CPU)
    except UnsupportedModelError as error:
        with pytest.raises(UnsupportedModelError, match=str(error)[:20]):
            _open(tmp_path, DeviceName.CUDA)
        return
    _check_same(_continue(_open(tmp_path, DeviceName.CUDA), 29, 5), _continue(oracle, 29, 5))


@pytest.mark.parametrize("quantization", Quantization)
def test_quantised_weights(quantization: Quantization, tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    backend, oracle = (_open(folder, device, quantization) for device in (DeviceName.CUDA, DeviceName.CPU))
    _check_same(_continue(backend, 60, 5), _continue(oracle, 60, 5), 0.05)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "sparse"])  # which is in 4 bits
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("kind", [KVCacheDtype.INT8, KVCacheDtype.FP8])
def test_slots_in_8_bits(
    policy: str, kind: KVCacheDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_captured: bool
) -> None:
    folder = save_checkpoint("llama", tmp_path)
    backend = _open(
        folder,
        DeviceName.CUDA,
        kv_cache_dtype=kind,
        policy=POLICIES[policy],
        is_captured=is_captured,
    )
    assert (backend.num_recorded > 0) == is_captured
    # A processor refuses fp8, since its kernels do not read it.
    monkeypatch.setattr("backends.torch_backend.backend.check_cache_dtypes", lambda *_: None)
    oracle = _open(folder, DeviceName.CPU, kv_cache_dtype=kind, policy=POLICIES[policy])
    _check_same(_continue(backend, 150, 5), _continue(oracle, 150, 5), 0.02)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_stored_prompt_is_restored(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_store, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(spec, "prefill_shapes", lambda _config, _max_len: (PrefillShape(1, BLOCK),))
    check_hit(open_drive(tmp_path, SNAPSTREAM, architecture, device=DeviceName.CUDA), prompt_of(60), 56)


@pytest.mark.parametrize("kind", [KVCacheDtype.INT8, KVCacheDtype.FP8])
def test_a_prompt_stored_in_8_bits_is_restored(
    kind: KVCacheDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_store, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(spec, "prefill_shapes", lambda _config, _max_len: (PrefillShape(1, BLOCK),))
    policy = PolicyOptions(PolicyName.STREAMING_LLM, num_sink=2, num_recent=29)
    drive = open_drive(tmp_path, policy, device=DeviceName.CUDA, prefix_cache_dtype=kind)
    check_rounded_hit(drive, prompt_of(60), 56, kind)


def _attention_inputs(
    rows: int, num_queries: int, heads: tuple[int, int], width: int, entries: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, and keys and values as views of longer slots."""
    num_heads, num_kv_heads = heads
    query = torch.randn(rows, num_heads, num_queries, width, device="cuda")
    slots = torch.randn(2, rows, num_kv_heads, entries + 3, width, device="cuda")
    return query, slots[0, :, :, :entries], slots[1, :, :, :entries]


def _difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "width", "entries", "softcap", "has_sinks"),
    [
        ((4, 2), 16, 700, None, False),
        ((8, 2), 24, 513, 30.0, False),
        ((8, 8), 64, 300, None, True),
        ((32, 8), 128, 8192, None, False),
        ((8, 1), 256, 1024, 50.0, True),
        ((64, 1), 64, 40, None, False),
    ],
)
def test_the_kernel_of_decode(
    heads: tuple[int, int],
    width: int,
    entries: int,
    softcap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    query, key, value = (part.to(dtype) for part in _attention_inputs(3, 1, heads, width, entries))
    is_live = torch.rand(3, 1, entries, device="cuda") < 0.5
    is_live[1] = torch.arange(entries, device="cuda") == 3  # the other parts are not read
    is_live[2] = False  # a slot without a token
    bias = torch.zeros(is_live.shape, device="cuda").masked_fill(~is_live, MASKED)
    sinks = torch.randn(heads[0], device="cuda") if has_sinks else None
    options = AttentionOptions(width**-0.5, softcap, sinks)
    assert fused_attention.fits_decode(query, key, value, bias)
    output = fused_attention.decode_attention(query, key, value, bias, options)
    expected = grouped_attention(
        query.double(), key.double(), value.double(), bias.double(), scaling=options.scaling,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip
    assert output.isfinite().all()
    assert _difference(output[:2], expected[:2]) < (1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("num_queries", [2, 100, 512])
def test_the_kernel_of_prompts(num_queries: int) -> None:
    torch.manual_seed(1)
    query, key, value = (part.bfloat16() for part in _attention_inputs(1, num_queries, (8, 2), 128, 700))
    options = AttentionOptions(128**-0.5)
    assert fused_attention.fits_prompt(query, key, value, options)
    entry = torch.arange(700, device="cuda")
    is_seen = entry <= entry[-num_queries:, None]
    bias = torch.zeros(is_seen.shape, device="cuda").masked_fill(~is_seen, MASKED)[None]
    expected = grouped_attention(
        query.double(), key.double(), value.double(), bias.double(), scaling=options.scaling
    )
    assert _difference(fused_attention.prompt_attention(query, key, value, options), expected) < 1e-2


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])  # the second one has a softcap
def test_captured_steps_score_keys_by_the_kernel(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 64 fit it, those of the other tests do not."""
    path = str(save_checkpoint(architecture, tmp_path, head_dim=64))
    kernel, calls = fused_attention.stored_scores, []

    def counted(query: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append(query.shape)
        return kernel(query, *others)

    monkeypatch.setattr(fused_attention, "stored_scores", counted)
    policy = POLICIES["sparse"]
    captured = open_recorded(path, policy, CudaRecorder(torch.device("cuda")), DeviceName.CUDA)
    assert calls
    assert captured.num_recorded > 0
    _check_same(serve_all(captured), serve_all(open_recorded(path, policy, unrecorded)))


def _rows(*shape: int) -> torch.Tensor:
    """Return rows whose rotation in 64s is exact in any order of its sums."""
    return torch.randint(-99, 99, shape).float()


def test_a_store_has_its_values_in_the_hosts_memory() -> None:
    """A captured graph reads them there, and sees what is written later."""
    torch.manual_seed(1)
    before = torch.cuda.memory_allocated()
    store, oracle = (TokenStore(512, 3, 2, (64, 192), device) for device in ("cuda", "cpu"))
    taken, whole = torch.cuda.memory_allocated() - before, sum(plane.nbytes for plane in store.planes)
    assert whole - store.host_bytes <= taken < whole
    chosen = torch.randint(40, (3, 2, 9))
    on_gpu = chosen.cuda()
    store.values(slice(None), on_gpu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = store.values(slice(None), on_gpu)
    for slot in (1, 2, 1):
        keys, values = _rows(2, 40, 64), _rows(2, 40, 192)
        for each, device in ((store, "cuda"), (oracle, "cpu")):
            each.set_centres(slot, keys.to(device))
            each.fill(slot, keys.to(device), values.to(device))
        graph.replay()
        assert torch.equal(found.cpu(), oracle.values(slice(None), chosen))


@pytest.mark.parametrize(("group", "width"), [(1, 64), (4, 128), (8, 96), (128, 576)])
def test_the_kernel_of_stored_keys(group: int, width: int) -> None:
    torch.manual_seed(1)
    store = TokenStore(700, 3, 2, (width,), "cuda")
    for slot in range(3):
        keys = torch.randn(2, 700, width, device="cuda") + 1
        store.set_centres(slot, keys)
        store.fill(slot, keys)
    query = torch.randn(2, 2, group, width, device="cuda")
    num_stored = torch.tensor([700, 65], device="cuda")
    assert fused_attention.fits_store(query, store)
    scores = fused_attention.stored_scores(query, store, slice(1, 3), num_stored)
    expected = query.double() @ store.keys(slice(1, 3)).double().transpose(2, 3)
    assert scores.shape == expected.shape
    assert _difference(scores[0], expected[0]) < 1e-5
    assert _difference(scores[1, ..., :65], expected[1, ..., :65]) < 1e-5


def _answer(server: Server, name: str) -> str:
    body = {
        "messages": [{"role": "user", "content": f"{name} keeps a falcon. Who keeps a falcon?"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_a_server_answers_as_on_the_cpu(tmp_path: Path) -> None:
    names = ("Ada", "Boris", "Clara")
    answers = []
    for device in ("cuda", "cpu"):
        with serve("--device", device, "--dtype", "float32", log=tmp_path / device) as server:
            answers.append([_answer(server, name) for name in names])
    assert answers[0] == answers[1]
    with serve("--device", "cuda", "--compile", log=tmp_path / "compiled") as server:
        assert all(_answer(server, name) for name in names)
    assert "recorded" in (tmp_path / "compiled").read_text()
