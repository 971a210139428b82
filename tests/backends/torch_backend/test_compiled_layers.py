"""Layers that torch compiles for captured steps draw what they drew before. This is shown on the CPU."""

from pathlib import Path

import pytest
from torch._dynamo.utils import counters

from backends.torch_backend.forward.cache import ModelCache
from backends.torch_backend.forward.stand_in import decoder_layers
from backends.torch_backend.torch_private import onednn
from backends.torch_backend.torch_private.dynamo import compiled_layers
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import Driver, Request
from tests.backends.oracle import random_prompt
from tests.backends.torch_backend.test_cuda_graphs import POLICIES, open_recorded, unrecorded


@pytest.mark.long
def test_compiled_layers_draw_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "supports", lambda _dtype: False)  # torch cannot compile its linear layers
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    path = str(save_checkpoint("llama", tmp_path))
    backends = [open_recorded(path, POLICIES["snapstream"], unrecorded) for _ in range(2)]
    requests = [
        [Request(random_prompt(length), (slot,)) for slot, length in enumerate((40, 5))] for _ in "ab"
    ]
    for backend, both in zip(backends, requests, strict=True):
        Driver(backend, 32).read(*both)
    compiled = backends[0]
    layers = decoder_layers(compiled._model)
    originals = [*layers]
    counters.clear()
    cache = compiled.pools[0].cache
    with compiled_layers(layers, cache, ModelCache.CALLED_BY_LAYERS, tmp_path / "code"):
        Driver(compiled, 32).decode(*requests[0], num_steps=6)
    assert counters["frames"]["ok"] >= 3, "torch has compiled the parts between the calls of the cache"
    assert [*layers] == originals
    assert not set(ModelCache.CALLED_BY_LAYERS) & vars(cache).keys()
    Driver(backends[1], 32).decode(*requests[1], num_steps=6)
    assert [request.tokens for request in requests[0]] == [request.tokens for request in requests[1]]
