"""Models that take turns: what a switch costs, who waits for it, and that no request is lost."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from backends.sn40l.backend import default_deployment
from backends.sn40l.description.model_config import load_model
from backends.sn40l.step.cost_model import DeploymentCost
from backends.sn40l.step.placement import DoesNotFitError, switch_seconds
from cache.policy import full
from commands.simulate.arrivals import Arrival, Traffic
from commands.simulate.replay import Replay, ReplayRecord, replay_config, replay_spec
from commands.simulate.switching import Switching
from server.options.command_line import OptionError
from tests.commands.simulate.test_command import json_of, simulate

MODELS = ("llama-3.1-8b", "qwen2.5-7b", "llama-3.2-3b")
FIRST = default_deployment(MODELS[0], "sn40l", 16)


def switching(*names: str, longest_turn: float = 1.0) -> Switching:
    deployments = tuple(replace(FIRST, model=load_model(name)) for name in names)
    return Switching(deployments, longest_turn, seed=0)


def play(arrivals: list[Arrival], *names: str, longest_turn: float = 1.0) -> ReplayRecord:
    return switching(*names, longest_turn=longest_turn).play(
        arrivals, replay_spec(4, full(4096), 4096), replay_config(0.2)
    )


def test_a_switch_takes_the_weights_from_ddr() -> None:
    """As published: 10 ms for an 8B on 16 sockets."""
    arrivals = [Arrival(0.0, 100, 5, model=MODELS[1]), Arrival(100.0, 100, 5, model=MODELS[0])]
    record = play(arrivals, *MODELS[:2])
    seconds = [switch_seconds(one) for one in reversed(switching(*MODELS[:2]).deployments)]
    assert record.num_switches == 2
    assert record.switch_seconds == pytest.approx(sum(seconds))
    assert seconds[1] == pytest.approx(0.010, rel=0.05)
    alone = play([replace(arrivals[1], time=0.0)], *MODELS[:2])
    assert alone.num_switches == 0
    assert record.time_to_first_token[1] == pytest.approx(alone.time_to_first_token[0] + seconds[1])


def test_one_model_alone_is_a_plain_replay() -> None:
    arrivals = list(Traffic(20.0, 200, 500, 50).arrivals())
    spec = replay_spec(4, full(4096), 4096)
    cost = DeploymentCost(FIRST, spec.pools[0])
    plain = Replay(spec, cost, replay_config(0.2), sample_interval=math.inf).run(arrivals)
    turns = play(arrivals, MODELS[0])
    assert turns.num_switches == 0
    assert turns.end_times == pytest.approx(plain.end_times)
    assert turns.num_refused == plain.num_refused


def test_no_request_is_lost_and_each_model_gets_its_turn() -> None:
    arrivals = list(Traffic(60.0, 300, 500, 50, seed=4).arrivals())
    records = {turn: play(arrivals, *MODELS, longest_turn=turn) for turn in (0.05, 1.0)}
    for record in records.values():
        assert len(record.end_times) + record.num_refused == 300
        assert record.num_output_tokens == sum(
            one.num_output_tokens for one in arrivals if one.num_prompt_tokens + one.num_output_tokens <= 4096
        )
        assert record.busy_seconds + record.switch_seconds <= record.seconds * (1 + 1e-9)
    assert records[0.05].num_switches > records[1.0].num_switches > 4


def test_a_waiting_model_waits_no_longer_than_a_turn_and_its_end() -> None:
    busy = [Arrival(index / 100, 100, 50, model=MODELS[0]) for index in range(600)]
    late = Arrival(1.0, 100, 5, model=MODELS[1])
    arrivals = sorted((*busy, late), key=lambda one: one.time)
    record = play(arrivals, *MODELS[:2], longest_turn=2.0)
    assert record.num_switches == 2
    # The turn began at 0, and what was under way then ended first.
    waits = [whole for whole, end in zip(record.end_to_end, record.end_times, strict=True) if end < 2.5]
    assert 1.0 < max(waits) < 1.3


def test_what_several_models_cannot_have_is_refused() -> None:
    small = replace(FIRST, machine=replace(FIRST.machine, ddr_capacity=1e9))
    with pytest.raises(DoesNotFitError, match="does not fit into DDR: weights of 2 models"):
        Switching((small, small), 1.0, 0)
    for flags in ("--draft-model llama-3.2-1b --acceptance 0.5", "--series series.csv"):
        with pytest.raises(OptionError, match=r"(is|are) of one model"):
            simulate("replay", "--other-models", "qwen2.5-7b", *flags.split())
    with pytest.raises(OptionError, match="--split is of one model"):
        simulate("plan", "--other-models", "qwen2.5-7b", "--split")
    with pytest.raises(OptionError, match="--other-models must be a model"):
        simulate("replay", "--other-models", "gpt-9")


def test_a_trace_may_name_the_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"time": 10 * i, "num_prompt_tokens": 50, "num_output_tokens": 5, "model": MODELS[i % 2]}
        for i in range(6)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ("replay", "--trace", str(trace), "--other-models", MODELS[1])
    assert json_of(capsys, *options)["switches"] == 5
    with pytest.raises(OptionError, match=r"model must be one of llama-3\.1-8b, llama-3\.2-3b, got 'qwen"):
        simulate("replay", "--trace", str(trace), "--other-models", MODELS[2])


@pytest.mark.long
def test_a_plan_counts_the_switches(capsys: pytest.CaptureFixture[str]) -> None:
    """Three models in short turns carry less together than one of them alone, and a replay agrees."""
    common = ("--sockets", "16", "--policy", "full", "--mean-output", "50")
    plan = ("plan", *common, "--context", "1000", "--requests", "40", "--max-e2e", "10")
    several = ("--other-models", "qwen2.5-7b,qwen3-8b", "--longest-turn", "0.05")
    (alone,) = json_of(capsys, *plan)["options"]
    (shared,) = json_of(capsys, *plan, *several)["options"]
    assert shared["requests_per_second"] < alone["requests_per_second"]
    values = json_of(
        capsys,
        *(
            "replay",
            *common,
            *several,
            "--max-model-len",
            "1000",
            "--shape",
            "poisson",
            "--mean-prompt",
            "950",
        ),
        *("--no-varies", "--seed", "7", "--requests", "800", "--num-slots", str(shared["num_slots"])),
        *("--rate", str(shared["requests_per_second"])),
    )
    assert values["switches"] > 0
    assert values["output_tokens_per_second"] == pytest.approx(shared["tokens_per_second"], rel=0.1)
