"""Pooled prompts are transformers' own last hidden states, in chunks and in company, and take no slot."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from backends.clock import VirtualClock
from backends.interface import Backend, PromptPooling, SamplingParams
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.scorer import WindowScorer
from scheduler.admission import admit
from scheduler.config import SchedulerConfig
from scheduler.messages import Add, EngineOutput, FinishReason, StopCriteria
from scheduler.scheduler import Scheduler
from tests.backends.checkpoints import ARCHITECTURES, load_oracle, save_checkpoint
from tests.backends.driver import open_backend
from tests.backends.oracle import random_prompt


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def backend(path: Path) -> Iterator[Backend]:
    backend = open_backend(
        path,
        PolicyOptions(PolicyName.SNAPSTREAM, slot_capacity=40, scorer=WindowScorer(observation_window=8)),
        max_model_len=64,
        prefill_chunk=8,
    )
    yield backend
    backend.close()


def add(name: str, prompt: list[int], max_tokens: int = 0, pooling: PromptPooling | None = None) -> Add:
    return Add(
        name, tuple(prompt), SamplingParams(temperature=0.0), StopCriteria(max_tokens), 0.0, pooling=pooling
    )


def serve(backend: Backend, *adds: Add) -> dict[str, EngineOutput]:
    """Run requests together to their ends, and return the last output of each with all of its tokens."""
    scheduler = Scheduler(
        backend.spec, SchedulerConfig(max_inter_token_latency=60), VirtualClock()
    )  # on a busy machine too
    for one in adds:
        scheduler.add(admit(one, backend.spec))
    most_slots = 0
    while (batch := scheduler.schedule()) is not None:
        most_slots = max(most_slots, scheduler.stats().num_slots_in_use)
        scheduler.update(batch, backend.submit(batch).result())
    assert most_slots == sum(one.stop.max_tokens > 0 for one in adds)
    outputs = scheduler.take_outputs()
    tokens = {
        one.request_id: tuple(
            token for output in outputs if output.request_id == one.request_id for token in output.tokens
        )
        for one in adds
    }
    return {
        output.request_id: replace(output, tokens=tokens[output.request_id])
        for output in outputs
        if output.final is not None
    }


def expected(oracle: PreTrainedModel, prompt: list[int], pooling: PromptPooling) -> torch.Tensor:
    with torch.inference_mode():
        hidden: torch.Tensor = oracle.base_model(torch.tensor([prompt])).last_hidden_state[0]
    return hidden.mean(0) if pooling is PromptPooling.MEAN else hidden[-1]


def test_equal_to_the_unmodified_model(backend: Backend, path: Path) -> None:
    oracle = load_oracle(path)
    prompts = {
        f"{pooling}-{length}": (pooling, random_prompt(length))
        for pooling in PromptPooling
        for length in (1, 7, 8, 9, 29, 50)
    }
    pooled = [add(name, prompt, pooling=pooling) for name, (pooling, prompt) in prompts.items()]
    served = serve(
        backend,
        add("beside", random_prompt(20), max_tokens=5),
        *pooled,
        add("long", random_prompt(50), max_tokens=5),
    )
    for name, (pooling, prompt) in prompts.items():
        final = served[name].final
        assert final is not None
        assert (final.reason, final.num_output_tokens) == (FinishReason.LENGTH, 0)
        own = expected(oracle, prompt, pooling)
        rounding = 1e-5 * own.abs().max().item()  # that of the vector, of which no number alone is exact
        torch.testing.assert_close(torch.tensor(served[name].embedding), own, rtol=0, atol=rounding)
    assert not served["beside"].embedding


def test_neighbours_are_not_disturbed(backend: Backend) -> None:
    talk = add("talk", random_prompt(45), max_tokens=8)
    alone = serve(backend, talk)["talk"].tokens
    assert (
        serve(backend, talk, add("pooled", random_prompt(30), pooling=PromptPooling.MEAN))["talk"].tokens
        == alone
    )
