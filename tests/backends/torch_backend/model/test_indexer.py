"""The choice of an indexer: which entries each query attends to, also in slots that have lost some.

That tokens are those of transformers is shown in `test_families` and `test_exact_full`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
from backends.torch_backend.forward.step import KindStep
from backends.torch_backend.model import indexer
from backends.torch_backend.model.attention import MASKED, grouped_attention
from backends.torch_backend.native.kernels import kernels_are_supported, load_kernels
from backends.torch_backend.torch_private import onednn
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from cache.scorer import WindowScorer
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import GREEDY, Driver, Request, open_backend
from tests.backends.oracle import random_prompt

SNAPSTREAM = PolicyOptions(
    PolicyName.SNAPSTREAM, num_sink=2, num_recent=8, num_kept=5, scorer=WindowScorer(3)
)


@pytest.mark.parametrize("num_unmasked", [0, 3])
@pytest.mark.parametrize("num_best", [1, 4, 9])
def test_each_query_sees_the_best_of_the_entries_that_it_saw(num_unmasked: int, num_best: int) -> None:
    generator = torch.Generator().manual_seed(num_best)
    rows, queries, entries = 2, 3, 9
    ranks = torch.randn(rows, queries, entries, generator=generator)
    is_seen = torch.rand(rows, queries, entries - num_unmasked, generator=generator) < 0.6
    bias = torch.where(is_seen, 0.0, MASKED)
    chosen = KindStep(torch.zeros(rows, queries), bias, num_unmasked).of_best(ranks, num_best)
    assert (chosen.num_unmasked, chosen.bias.shape) == (0, ranks.shape)
    for row in range(rows):
        for query in range(queries):
            seen = [*range(num_unmasked), *(is_seen[row, query].nonzero()[:, 0] + num_unmasked).tolist()]
            best = sorted(seen, key=lambda entry: -ranks[row, query, entry].item())[:num_best]
            assert (chosen.bias[row, query] == 0).nonzero()[:, 0].tolist() == sorted(best)


def test_a_row_of_compressed_slots_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """15 entries, of which the indexer chooses 6: neighbours change nothing, and the choice matters."""
    monkeypatch.setattr(indexer, "_MAX_PRODUCTS_CPU", 1000)  # ranks are of blocks of rows and of queries

    def answers(*, is_alone: bool, num_chosen: int = 6) -> list[list[int]]:
        path = save_checkpoint("deepseek-v32", tmp_path, index_topk=num_chosen)
        backend = open_backend(path, SNAPSTREAM, max_model_len=96, num_slots=4)
        driver = Driver(backend, 8)
        lengths = (5, 14, 15, 40)
        requests = [
            Request(random_prompt(n), slots=(slot,), sampling=GREEDY) for slot, n in enumerate(lengths)
        ]
        for request in requests:
            driver.read(request)
            if is_alone:
                driver.decode(request, num_steps=20)
        if not is_alone:
            driver.decode(*requests, num_steps=20)
        return [request.tokens for request in requests]

    alone = answers(is_alone=True)
    assert answers(is_alone=False) == alone
    assert all(a != b for a, b in zip(answers(is_alone=True, num_chosen=99), alone, strict=True))


def test_weights_of_another_type_than_the_model_are_used(tmp_path: Path) -> None:
    """transformers keeps an indexer's `weights_proj` in float32 where the model is in float16."""
    path = save_checkpoint("deepseek-v32", tmp_path)
    answers = []
    for dtype in (DtypeName.FLOAT32, DtypeName.FLOAT16):
        pools = (PoolOptions(2, PolicyOptions(PolicyName.FULL)),)
        config = TorchBackendConfig(
            str(path), pools, device=DeviceName.CPU, dtype=dtype, max_model_len=64, prefill_chunk=8
        )
        request = Request(random_prompt(29))
        Driver(TorchBackend(config), 8).run(request, num_tokens=3)
        answers.append(request.tokens)
    assert answers[0] == answers[1]


@pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")
def test_a_prompt_in_bfloat16_is_ranked_and_read_in_float32_where_the_cpu_lacks_it(
    tmp_path: Path, built_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels too: they know no ranks, so that the attention is torch's."""
    dtypes: list[torch.dtype] = []

    def attend(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        dtypes.append(query.dtype)
        return grouped_attention(query, *arguments, **options)

    monkeypatch.setattr(onednn, "multiplies", lambda dtype: dtype is not torch.bfloat16)
    monkeypatch.setattr("backends.torch_backend.forward.cache.grouped_attention", attend)
    config = TorchBackendConfig(
        str(save_checkpoint("deepseek-v32", tmp_path)),
        (PoolOptions(2, PolicyOptions(PolicyName.FULL)),),
        device=DeviceName.CPU,
        dtype=DtypeName.BFLOAT16,
        max_model_len=64,
        prefill_chunk=8,
        compile=False,
    )
    backend = TorchBackend(config)
    load_kernels(built_kernels)
    backend._kernels.use()
    request = Request(random_prompt(29))
    driver = Driver(backend, 8)
    driver.read(request)
    driver.decode(request, num_steps=2)
    assert set(dtypes) == {torch.float32}
