"""Deployments and shapes for property tests."""

from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from backends.sn40l.description.hardware import Machine, load_machine
from backends.sn40l.description.model_config import Model, load_model
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "gpt-oss-120b", "deepseek-r1", "llama-3.2-1b")


@cache
def model(name: str) -> Model:
    return load_model(name)


@cache
def sn40l() -> Machine:
    return load_machine("sn40l")


@cache
def roomy() -> Machine:
    """An SN40L that holds any model on any number of sockets, so that times can be compared freely."""
    return replace(sn40l(), hbm_capacity=1e15, memory_unit_capacity=1e12)


models = st.sampled_from(MODELS).map(model)
executions = st.sampled_from(Execution)
sockets = st.sampled_from((1, 2, 4, 8, 16))
shapes = st.builds(DecodeShape, batch=st.integers(1, 300), capacity=st.integers(1, 200_000))


def deployments(machine: Machine) -> st.SearchStrategy[Deployment]:
    return st.builds(Deployment, models, st.just(machine), sockets, executions)
