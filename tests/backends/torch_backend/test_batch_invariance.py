"""A request's bits do not depend on the number of slots and entries that a decode step reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.interface import SampledToken
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.compiled.decode_step import DecodeStepGraphs
from backends.torch_backend.config import DeviceName, DtypeName, Quantization, TorchBackendConfig
from backends.torch_backend.forward.plan import DecodePlan
from backends.torch_backend.native.kernels import kernels_are_supported
from backends.torch_backend.torch_private import onednn
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from cache.scorer import WindowScorer
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import GREEDY, Driver, Request
from tests.backends.oracle import random_prompt

CHUNK = 64
SNAPSTREAM = PolicyOptions(
    num_sink=4, num_recent=200, num_kept=180, scorer=WindowScorer(observation_window=8)
)
DTYPES = [DtypeName.FLOAT32]
if onednn.supports(torch.bfloat16):
    DTYPES.append(DtypeName.BFLOAT16)
# In float32, the products of very few rows with the matrices of latents and of experts round as the number of
# rows has it.
MODELS = [("llama", dtype) for dtype in DTYPES]
MODELS += [("lfm2", DTYPES[-1])]
MODELS += [("deepseek-v3", dtype) for dtype in DTYPES if dtype is DtypeName.BFLOAT16]
FULL = PolicyOptions(PolicyName.FULL)
SUBJECTS: list[Any] = [(*model, False, policy) for model in MODELS for policy in (FULL, SNAPSTREAM)]
SUBJECTS += [
    pytest.param("llama", dtype, True, policy, marks=pytest.mark.long)
    for dtype, policy in ((DTYPES[0], SNAPSTREAM), (DTYPES[-1], FULL))
]


def _backend(
    model: Path,
    dtype: DtypeName,
    policy: PolicyOptions,
    compile_cache: Path | None,
    quantization: Quantization = Quantization.NONE,
) -> TorchBackend:
    """Return a backend of six slots. Without `compile_cache`, nothing is compiled."""
    config = TorchBackendConfig(
        str(model),
        device=DeviceName.CPU,
        dtype=dtype,
        quantization=quantization,
        pools=(PoolOptions(6, policy),),
        max_model_len=512,
        prefill_chunk=CHUNK,
        compile=compile_cache is not None,
    )
    return TorchBackend(config if compile_cache is None else replace(config, compile_cache=compile_cache))


def _answer(backend: TorchBackend, neighbours: int, slot: int) -> list[SampledToken]:
    """Answer one short request beside longer and longer ones in the neighbouring slots."""
    driver = Driver(backend, CHUNK)
    others = [other for other in range(neighbours + 1) if other != slot]
    request = Request(
        random_prompt(20),
        slots=(slot,),
        sampling=replace(GREEDY, temperature=0.8, top_p=0.9, seed=3, num_logprobs=5),
    )
    beside = [
        Request(random_prompt(100 * (number + 1), seed=1), slots=(other,))
        for number, other in enumerate(others)
    ]
    for one in (request, *beside):
        driver.read(one)
    for one in beside:
        driver.decode(request, one)
    driver.decode(request, *beside, num_steps=8)
    driver.decode(request, num_steps=16 - len(beside))
    return request.outputs[0]


@pytest.mark.parametrize(
    ("architecture", "dtype", "is_compiled", "policy"),
    SUBJECTS,
    ids=lambda value: value.name.value if isinstance(value, PolicyOptions) else None,
)
def test_every_bit_is_batch_invariant(
    tmp_path: Path,
    architecture: str,
    dtype: DtypeName,
    is_compiled: bool,
    policy: PolicyOptions,
    compile_cache: Path,
) -> None:
    path = save_checkpoint(architecture, tmp_path, num_hidden_layers=3)
    backend = _backend(path, dtype, policy, compile_cache if is_compiled else None)
    if backend.compiled is not None:
        backend.warmup()
        backend.compiled.wait()
        assert backend.compiled.steps[0].min_rows == 1
    _check_answers(backend)


def _check_answers(backend: TorchBackend) -> None:
    alone = _answer(backend, neighbours=0, slot=0)
    assert _answer(backend, neighbours=1, slot=0) == alone
    assert _answer(backend, neighbours=4, slot=1) == alone
    assert _answer(backend, neighbours=0, slot=0) == alone


@pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")
@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [
        ("llama", Quantization.NONE),
        ("llama", Quantization.INT4),
        ("lfm2", Quantization.W8A8),
        ("afmoe", Quantization.INT8),  # a mixture, whose router stays a product of torch
    ],
)
def test_one_row_has_the_bits_of_several(
    tmp_path: Path,
    architecture: str,
    quantization: Quantization,
    built_kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sequence alone is decoded in steps of one row, where the kernels and padded products allow it."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("backends.torch_backend.compiled.code.packaged_kernels", lambda: built_kernels)
    run = DecodeStepGraphs.run
    rows: list[int] = []

    def noting(graphs: DecodeStepGraphs, plan: DecodePlan) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(plan.bucket[0])
        return run(graphs, plan)

    monkeypatch.setattr(DecodeStepGraphs, "run", noting)
    path = save_checkpoint(architecture, tmp_path)
    backend = _backend(path, DtypeName.BFLOAT16, SNAPSTREAM, tmp_path, quantization)
    backend.warmup()
    assert backend.compiled is not None
    backend.compiled.wait()
    _check_answers(backend)
    assert set(rows) == {1, 2, 4, 6}
