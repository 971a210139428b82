"""Plans by load: replays agree with them, limits hold, and nothing of the machine is counted twice."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends.interface import PrefixSpec
from backends.sn40l.backend import default_deployment
from backends.sn40l.description.hardware import load_machine_file
from backends.sn40l.description.model_config import load_model
from backends.timed import SimulatedStore
from cache.policy import full
from cache.policy_options import PolicyOptions
from commands.shared.table import percentile
from commands.simulate.arrivals import HASH_TOKENS, Arrival, TraceError, Traffic, read_trace
from commands.simulate.candidate import Candidate, Limits
from commands.simulate.drafting import Drafting
from commands.simulate.load import Load, load_of
from commands.simulate.planning import Carried, candidates, carry, carry_most, pareto
from commands.simulate.switching import Switching
from server.options.command_line import OptionError
from tests.commands.simulate.test_command import json_of, simulate
from tests.server.options.test_config import config_of


def load(mean_prompt: int = 3000, mean_output: int = 100, num_requests: int = 40) -> Load:
    traffic = Traffic(1.0, num_requests, mean_prompt, mean_output, varies=False)
    return load_of(list(traffic.arrivals()), mean_prompt + mean_output)


def candidate(machine: str = "h100", capacity: int = 1024, **choices: Any) -> Candidate:
    deployment = default_deployment("llama-3.1-8b", machine, 1 if machine == "h100" else 16)
    return Candidate(deployment, PolicyOptions(slot_capacity=capacity).resolve(3100), 16, **choices)


def carried(one: Candidate, limits: Limits, **sizes: int) -> Carried:
    machine = "h100" if one.deployment.num_sockets == 1 else "sn40l"
    found = carry(one, load(**sizes), limits, load_machine_file(machine))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "machine", "sockets", "context", "limits"),
    [
        pytest.param("llama-3.1-8b", "h100", "1", "4000", (), marks=pytest.mark.long),
        ("llama-3.1-8b", "h100", "1", "16000", ("--max-tpot", "0.05")),
        pytest.param("llama-3.1-8b", "sn40l", "16", "16000", ("--max-ttft", "5"), marks=pytest.mark.long),
        ("llama-3.1-70b", "h200", "8", "8000", ("--max-tpot", "0.04")),
        pytest.param("qwen3-30b-a3b", "mi300x", "1", "8000", (), marks=pytest.mark.long),
    ],
)
def test_a_replay_of_the_plan_agrees_within_a_tenth(
    capsys: pytest.CaptureFixture[str],
    model: str,
    machine: str,
    sockets: str,
    context: str,
    limits: tuple[str, ...],
) -> None:
    common = ("--model", model, "--machine", machine, "--sockets", sockets, "--policy", "full")
    check_agreement(capsys, context, common, limits)


LLAMA_8B = ("llama-3.1-8b", "h100", "1", "full")
LLAMA_70B = ("llama-3.1-70b", "sn40l", "16", "snapstream")
QWEN = ("qwen3-30b-a3b", "mi300x", "2", "full")
PAGED = ("--paged",)
QUICK = ("--max-inter-token-latency", "0.05")
SPECULATIVE = ("--speculative-prefill-model", "llama-3.2-1b", "--max-tpot", "0.1")
DRAFTED = ("--draft-model", "llama-3.2-1b", "--acceptance", "0.7")
IN_DDR = ("--slots-in-ddr",)


@pytest.mark.long
@pytest.mark.parametrize(
    ("deployment", "choices"),
    [
        *((LLAMA_8B, choices) for choices in ((), PAGED, QUICK, IN_DDR)),
        *((LLAMA_70B, choices) for choices in ((), PAGED, SPECULATIVE, DRAFTED, IN_DDR)),
        *((QWEN, choices) for choices in (QUICK, SPECULATIVE, DRAFTED)),
    ],
)
def test_plans_and_replays_agree_with_each_choice_on_two_machines(
    capsys: pytest.CaptureFixture[str], deployment: tuple[str, str, str, str], choices: tuple[str, ...]
) -> None:
    model, machine, sockets, policy = deployment
    limits = choices[-2:] if "--max-tpot" in choices else ()
    common = ("--model", model, "--machine", machine, "--sockets", sockets, "--policy", policy)
    check_agreement(capsys, "4000", (*common, *choices[: len(choices) - len(limits)]), limits)


def check_agreement(
    capsys: pytest.CaptureFixture[str], context: str, common: tuple[str, ...], limits: tuple[str, ...]
) -> None:
    """Replay the best plan with other arrivals than it had."""
    mean_output = int(context) // 80
    common = (*common, "--mean-output", str(mean_output))
    best = json_of(capsys, "plan", *common, "--context", context, "--requests", "60", *limits)["options"][0]
    values = json_of(
        capsys,
        *("replay", *common, "--max-model-len", context, "--shape", "poisson"),
        *(
            "--mean-prompt",
            str(int(context) - mean_output),
            "--no-varies",
            "--seed",
            "7",
            "--requests",
            "800",
        ),
        *("--num-slots", str(best["num_slots"]), "--rate", str(best["requests_per_second"])),
    )
    assert values["refused"] == 0
    # What a replay measures ends with the last answer, so its rate is a little below that of the arrivals.
    assert values["output_tokens_per_second"] == pytest.approx(best["tokens_per_second"], rel=0.1)


def test_limits_hold_at_the_rate_and_break_above_it() -> None:
    limits = Limits(max_ttft=1.0, max_tpot=0.02)
    one = candidate()
    found = carried(one, limits)
    assert limits.are_met(found.record)
    assert 0 < found.rate < found.bound
    more = one.play(load().at(1.3 * found.rate, 80), load(), 1.3 * found.rate)
    assert not limits.are_met(more)
    free = carried(one, Limits())
    assert free.rate > found.rate
    assert carry(one, load(), Limits(max_tpot=1e-6), load_machine_file("h100")) is None


def test_a_burst_among_the_last_arrivals_is_no_queue_that_grows() -> None:
    """Twice as many of these 100 requests are under way in the last quarter as in the second."""
    one = replace(candidate("sn40l", capacity=4000), policy=full(4000), num_slots=32)
    found = carry(one, load(3800, 200, 100), Limits(), load_machine_file("sn40l"))
    assert found is not None
    assert found.rate > 0.9 * found.bound


def test_fewer_slots_are_chosen_where_more_would_break_the_limits() -> None:
    """All slots of a static graph slow a step, and more prompts are read between two of them."""
    one = replace(candidate("sn40l", capacity=4000), policy=full(4000), num_slots=128)
    limits, machine = Limits(max_tpot=0.02), load_machine_file("sn40l")
    given, most = (find(one, load(3800, 200), limits, machine) for find in (carry, carry_most))
    assert given is not None
    assert most is not None
    assert most.candidate.num_slots < 128
    assert most.rate > 1.05 * given.rate


@pytest.mark.parametrize(
    ("mean_prompt", "mean_output", "limits", "num_slots"),
    [
        (200, 1000, Limits(max_tpot=0.0022), 32),  # twice the slots break the limit
        (200, 1000, Limits(max_e2e=1.2), 64),  # so does a half of them
        pytest.param(3900, 100, Limits(), 64, marks=pytest.mark.long),  # each half carries a little less
    ],
)
def test_what_is_carried_is_nearly_the_most_of_all_numbers_of_slots(
    mean_prompt: int, mean_output: int, limits: Limits, num_slots: int
) -> None:
    one = replace(candidate("sn40l", capacity=1024), num_slots=num_slots)
    loaded, machine = load(mean_prompt, mean_output, 20), load_machine_file("sn40l")
    most = carry_most(one, loaded, limits, machine)
    each = [carry(replace(one, num_slots=2**power), loaded, limits, machine) for power in range(8)]
    assert most is not None
    assert None in each or limits == Limits()
    assert most.rate >= 0.98 * max(found.rate for found in each if found is not None)


def test_a_plan_whose_verifications_do_not_fit_is_refused() -> None:
    drafts = ("--draft-model", "llama-3.2-1b", "--acceptance", "0.8", "--num-drafts", "10000")
    with pytest.raises(OptionError, match="does not fit into SRAM"):
        simulate("plan", "--sockets", "1", "--policy", "snapstream", *drafts)


def test_a_plan_counts_the_prompts() -> None:
    """16 sockets decode 21,600 tokens/s of an 8B at 8k entries, but prompts of 32k leave few of them."""
    deployment = default_deployment("llama-3.1-8b", "sn40l", 16)
    policy = PolicyOptions(slot_capacity=8192).resolve(32500)
    one = Candidate(deployment, policy, 512)
    asked = load(32000, 500)
    decode_only = 512 / one.step_seconds(asked)
    assert decode_only > 20_000
    assert one.bound(asked, Limits()) * 500 < decode_only / 20


def test_the_bound_is_a_bound_and_has_a_range() -> None:
    found = carried(candidate(), Limits())
    assert found.rate <= found.bound
    assert found.bound_low < found.bound < found.bound_high
    assert found.goodput == pytest.approx(found.rate)
    assert 0.5 < found.record.busy_seconds / found.record.seconds <= 1


def test_the_range_of_the_bound_covers_a_draft() -> None:
    drafting = Drafting(default_deployment("llama-3.2-1b", "h100", 1), 1000, 512)
    one = candidate(drafting=drafting)
    slow = replace(one.deployment, machine=replace(one.deployment.machine, gemm_efficiency=0.35))
    assert one.on(slow).prompt_seconds(load()) > 1.3 * one.prompt_seconds(load())
    assert one.prompt_seconds(load()) > 1.8 * one.read_seconds(512)


def test_the_bound_counts_the_models_as_often_as_the_trace_does() -> None:
    """Nineteen of 20 requests are for the small model, the long one is for the large model."""
    large = candidate("sn40l")
    small = replace(large.deployment, model=load_model("llama-3.2-1b"))
    both = replace(large, switching=Switching((large.deployment, small), 1.0, 0))
    arrivals = [Arrival(float(i), 500, 20, model="llama-3.2-1b") for i in range(19)]
    mixed = load_of([*arrivals, Arrival(19.0, 3000, 80, model="llama-3.1-8b")], 3100)
    expected = 0.95 * large.on(small).request_seconds(load(500, 20)) + 0.05 * large.request_seconds(
        load(3000, 80)
    )
    assert 1 / both.bound(mixed, Limits()) == pytest.approx(expected)
    with pytest.raises(TraceError, match="model must be one of"):
        both.bound(load_of([*arrivals, replace(arrivals[0], time=20.0, model="other")], 3100), Limits())


def test_users_follow_littles_law() -> None:
    found = carried(candidate(), Limits(max_tpot=0.02), num_requests=200)
    in_use = found.record.slot_seconds / found.record.seconds
    assert found.users == pytest.approx(in_use, rel=0.3)


def test_prices_and_watts_become_dollars_and_energy() -> None:
    found = carried(candidate(), Limits())
    machine = found.candidate.deployment.machine
    hours = 1e6 / found.token_rate / 3600
    assert found.dollars_per_million == pytest.approx(machine.price * hours)
    assert found.kilowatt_hours_per_million == pytest.approx(machine.power / 1000 * hours)
    assert replace(found, price=0.0).dollars_per_million is None


def test_other_nodes_that_read_prompts_leave_the_decode_node_free() -> None:
    shared = carried(candidate(), Limits(max_tpot=0.02))
    split = carried(candidate(is_split=True), Limits(max_tpot=0.02))
    assert split.num_prefill_nodes > 0
    assert split.rate > 1.5 * shared.rate
    assert split.tpot < 0.02
    # The time elsewhere is part of the first token's.
    prompt = split.candidate.prompt_seconds(load())
    assert min(split.record.time_to_first_token) >= prompt


def test_prefill_nodes_are_for_the_rate_that_is_to_be_carried(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ("--context", "8000", "--mean-output", "100")
    plan = ("plan", "--split", "--sockets", "16", "--policy", "full", *lengths, "--requests", "40")
    (most,) = json_of(capsys, *plan)["options"]
    (part,) = json_of(capsys, *plan, "--rate", "40")["options"]
    assert part["replicas"] == 1
    assert part["requests_per_second"] == 40 < most["requests_per_second"] / 4
    assert part["num_prefill_sockets"] < most["num_prefill_sockets"] / 3
    assert part["users"] < most["users"]


def test_paged_memory_holds_more_sequences_than_slots() -> None:
    deployment = default_deployment("llama-3.1-8b", "h100", 1)
    policy = PolicyOptions(slot_capacity=32768).resolve(32768)
    asked = replace(load(2000, 100), max_model_len=32768)
    slots, paged = (
        next(candidates(deployment, policy, asked, Limits(), candidate(is_paged=is_paged)))
        for is_paged in (False, True)
    )
    assert paged.num_slots > 4 * slots.num_slots


def test_the_front_has_nothing_that_is_beaten() -> None:
    found = [carried(candidate(), Limits(max_tpot=limit)) for limit in (0.012, 0.02, 0.05)]
    worse = replace(found[1], rate=found[1].rate / 2)
    front = pareto([*found, worse])
    assert worse not in front
    assert front


def test_a_plan_names_replicas_cost_and_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot, manifest = tmp_path / "plan.png", tmp_path / "kustomization.yaml"
    options = (
        "plan --machine h100 --context 4000 --mean-output 20 --requests 20 --rate 20 --tokens-per-step 2 "
        "--max-ttft 1"
    )
    values = json_of(capsys, *options.split(), "--plot", str(plot), "--kubernetes", str(manifest))
    best = values["options"][0]
    kustomization = yaml.safe_load(manifest.read_text())
    assert kustomization["replicas"] == [{"name": "snapserve", "count": best["replicas"]}]
    (generator,) = kustomization["configMapGenerator"]
    planned = dict(literal.split("=", 1) for literal in generator["literals"])
    # The server takes these values.
    (pool,) = config_of(**planned).backend.config.pools
    assert (pool.num_slots, pool.policy.name) == (best["num_slots"], best["policy"])
    assert len(planned) >= 3
    assert best["replicas"] * best["requests_per_second"] >= 20
    assert (best["replicas"] - 1) * best["requests_per_second"] < 20
    assert best["tokens_per_second"] < best["tokens_per_second_with_drafts"]
    assert best["dollars_per_million_tokens"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert simulate(*options.split(), "--price", "100") == 0
    out = capsys.readouterr().out
    assert f"serve --model MODEL --num-slots {best['num_slots']} --policy" in out
    assert "snapserve simulate replay --model llama-3.1-8b" in out


def test_the_replay_that_a_plan_prints_gives_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """The command has every option of the plan, and as many requests as its last replay."""
    given = ["--prefill-chunk", "512", "--max-inter-token-latency", "0.1", "--seed", "3", "--uses-ddr"]
    load = ["--context", "1000", "--mean-output", "20", "--policy", "full", "--requests", "200"]
    plan = ["plan", "--machine", "h100", *load, *given]
    (best,) = json_of(capsys, *plan)["options"]
    simulate(*plan)
    served, printed = capsys.readouterr().out.splitlines()[-2:]
    assert served.endswith("--prefill-chunk 512 --max-inter-token-latency 0.1")
    command = printed.split()
    assert command[:3] == ["snapserve", "simulate", "replay"]
    assert set(given) <= set(command)
    values = json_of(capsys, *command[2:])
    assert values["requests"] >= 200
    assert values["output_tokens_per_second"] == pytest.approx(best["tokens_per_second"], rel=0.1)


def test_a_plan_takes_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    lines = [f"2024-05-10 00:00:{second:02d}.100000,{1000 + second},{50}" for second in range(30)]
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *lines)))
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in read_trace(trace)][1] == (1001, 50)
    options = ("plan", "--machine", "h100", "--trace", str(trace), "--policy", "full", "--context", "2000")
    (best,) = json_of(capsys, *options)["options"]
    assert best["requests_per_second"] > 1


def test_a_plan_counts_what_prompts_share(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    entries = (
        {"timestamp": 1000 * i, "input_length": 4000, "output_length": 20, "hash_ids": [*range(7), 100 + i]}
        for i in range(20)
    )
    trace.write_text("\n".join(map(json.dumps, entries)))
    common = "plan --machine h100 --policy full --context 5000 --requests 20 --max-ttft 1"
    options = (*common.split(), "--trace", str(trace))
    (shared,) = json_of(capsys, *options)["options"]
    (whole,) = json_of(capsys, *options, "--prefix-cache-bytes", "0")["options"]
    assert shared["requests_per_second"] > 1.5 * whole["requests_per_second"]
    assert shared["restored"] > 0.7
    assert whole["restored"] == 0


@pytest.mark.long
def test_prefill_nodes_share_what_they_have_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    entries = (
        {"timestamp": 1000 * i, "input_length": 4000, "output_length": 20, "hash_ids": [*range(7), 100 + i]}
        for i in range(400)
    )
    trace.write_text("\n".join(map(json.dumps, entries)))
    common = "plan --machine h100 --policy full --context 5000 --requests 400 --split"
    options = (*common.split(), "--trace", str(trace))
    (shared,) = json_of(capsys, *options)["options"]
    (whole,) = json_of(capsys, *options, "--prefix-cache-bytes", "0")["options"]
    assert shared["restored"] > 0.7
    assert whole["restored"] == 0
    per_node = [one["requests_per_second"] / one["num_prefill_sockets"] for one in (shared, whole)]
    assert per_node[0] > 1.5 * per_node[1]


def test_prefill_nodes_restore_only_what_is_complete_and_not_forgotten() -> None:
    one = candidate(is_split=True, store=SimulatedStore(PrefixSpec(7, HASH_TOKENS, 1 << 20), 1e12))
    document = tuple(range(5))
    at = [Arrival(time, 5 * HASH_TOKENS + 1, 5, hash_ids=(*document, 9)) for time in (0.0, 0.001, 50.0)]
    other = Arrival(60.0, 5 * HASH_TOKENS + 1, 5, hash_ids=(*range(20, 25), 29))
    last = replace(at[0], time=70.0)
    read, num_restored = one._read_elsewhere(at, 2)
    # The second prompt begins while the first one is being read.
    assert num_restored == 5 * HASH_TOKENS
    assert read[2].seconds_elsewhere < read[0].seconds_elsewhere / 2
    _, num_restored = one._read_elsewhere([*at[:1], other, last], 1)
    assert num_restored == 0
    assert all(arrival.hash_ids == () for arrival in read)


def test_a_round_of_the_same_arrivals_shares_nothing_with_the_one_before() -> None:
    arrivals = [Arrival(float(i), 600, 1, hash_ids=(0, i)) for i in range(3)]
    asked = load_of(arrivals, 700)
    assert asked.mean_restored == 2 * HASH_TOKENS // 3
    first, second = ({one.hash_ids[0] for one in asked.at(1.0, 6)[part]} for part in (slice(3), slice(3, 6)))
    assert len(first) == len(second) == 1
    assert first != second


def test_a_load_of_one_instant_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    entry = {"time": 1, "num_prompt_tokens": 5, "num_output_tokens": 5}
    trace.write_text("\n".join([json.dumps(entry)] * 3))
    with pytest.raises(ValueError, match="two requests at different times"):
        load_of(list(read_trace(trace)), 10)


def test_percentiles_are_those_of_the_limits() -> None:
    found = carried(candidate(), Limits(max_ttft=1.0, percent=50))
    assert (percentile(found.record.time_to_first_token, 50) or 0) <= 1.0
    assert found.goodput <= found.rate
