"""A model and a draft of another family in one engine: each computes what it computes alone."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from backends.clock import VirtualClock
from backends.composite import CompositeBackend
from backends.config import BackendConfig
from backends.interface import Importance
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchOptions
from backends.torch_backend.entry import ENTRY
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from scheduler.messages import AdmittedAdd
from tests.backends.checkpoints import save_checkpoint
from tests.scheduler.drive import Drive, request

BASE = BackendConfig(
    "", pools=(PoolOptions(2, PolicyOptions(slot_capacity=96)),), max_model_len=256, prefill_chunk=32
)


def opened(config: BackendConfig) -> TorchBackend:
    options = TorchOptions(device=DeviceName.CPU, dtype=DtypeName.FLOAT32, compile=False)
    configured = ENTRY.configure(config, options, lambda _: pytest.fail("no other backend"))
    backend = configured.load(VirtualClock(), 0)
    assert isinstance(backend, TorchBackend)
    return backend


def test_a_model_and_its_draft_do_not_disturb_each_other(tmp_path: Path) -> None:
    model = replace(BASE, model=str(save_checkpoint("llama", tmp_path)))
    draft = BASE.of_draft(str(save_checkpoint("qwen3", tmp_path)))
    ids = tuple(range(3, 300))
    answers = [
        request("a", 1, 12, prompt_token_ids=ids[:120]),
        request("b", 1, 12, prompt_token_ids=ids[9:60]),
    ]
    scored = [
        AdmittedAdd(replace(request(name, 1, 0, prompt_token_ids=prompt), importance=Importance(), pool=1))
        for name, prompt in (("x", ids[:200]), ("y", ids[50:290]))
    ]
    alone = Drive(backend=opened(model))
    alone.run(*answers)
    backend = CompositeBackend(opened(model), opened(draft))
    backend.warmup()
    both = Drive(backend=backend)
    both.run(answers[0], scored[0], answers[1], scored[1])
    drafts = Drive(backend=CompositeBackend(opened(model), opened(draft)))
    drafts.run(*reversed(scored))
    for name in "ab":
        assert both.tokens(name) == alone.tokens(name)
    for name in "xy":
        importance = both.outputs[name, 0][-1].importance
        assert importance == drafts.outputs[name, 0][-1].importance
        assert len(importance) == math.ceil(both.final(name).num_prompt_tokens / 32)
    assert "draft: " in backend.spec.description
    backend.close()
