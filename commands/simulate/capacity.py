"""`plan`: the load that deployments carry within limits, what it costs, and how to start the chosen one.

`planning` computes; this module prints.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.sn40l.comparison.plan import socket_counts
from backends.sn40l.description.hardware import load_machine_file
from backends.sn40l.step.deployment import DecodeShape, Deployment
from backends.sn40l.step.placement import DoesNotFitError, fitting
from cache.pool_options import KVCacheDtype
from commands.shared.table import percentile, table
from commands.simulate.answer import Answer
from commands.simulate.arrivals import Traffic, read_trace
from commands.simulate.candidate import Candidate, Limits
from commands.simulate.deployment import (
    candidate_of,
    policy_of,
    serving_deployment,
)
from commands.simulate.load import Load, load_of
from commands.simulate.manifests import kustomization
from commands.simulate.options import PlanOptions, ServingOptions, WeightDtype
from commands.simulate.planning import Carried, candidates, carry_most, lighter, pareto
from server.options.command_line import OptionError


@dataclass(frozen=True, slots=True)
class _Row:
    """What a candidate carries, and how many replicas of it carry the whole load."""

    carried: Carried
    replicas: int
    is_on_front: bool

    @property
    def num_sockets(self) -> int:
        return self.replicas * self.carried.num_sockets


def plan_answer(options: PlanOptions) -> Answer:
    """Return what each deployment carries within the limits, cheapest first.

    Raises `OptionError` if none does.
    """
    deployment = serving_deployment(options, max(options.sockets) if options.sockets else None)
    deployment.model.check_context(options.context)
    load = _load(options)
    limits = Limits(options.max_ttft, options.max_tpot, options.max_e2e, options.percentile)
    sized = [
        replace(deployment, num_sockets=count)
        for count in sorted(options.sockets or socket_counts(deployment.machine.max_sockets))
    ]
    replicas = [
        (one, max(1, math.ceil((options.rate or 0.0) / one.rate - 1e-9)))
        for one in _carried(options, sized, load, limits)
    ]
    if options.split and options.rate is not None:
        # Prefill nodes are for the load, not for the most that the decode node could take.
        replicas = [(lighter(one, load, limits, options.rate / count), count) for one, count in replicas]
    front = {id(one) for one in pareto([one for one, _ in replicas])}
    rows = sorted(
        (_Row(one, count, id(one) in front) for one, count in replicas),
        key=lambda row: (row.num_sockets, -row.carried.token_rate),
    )
    if options.plot:
        from backends.sn40l.plots import draw_plan

        points = [(1 / row.carried.tpot, row.carried.token_rate / row.carried.num_sockets) for row in rows]
        draw_plan(options.plot, points, [_label(row) for row in rows], [row.is_on_front for row in rows])
    title = (
        f"{options.model} on {options.machine}, prompts of {load.mean_prompt:,} and answers of "
        f"{load.mean_output:,.0f} tokens on average"
    )
    if options.kubernetes:
        settings = _settings(options, rows[0], load)
        options.kubernetes.write_text(kustomization(title, rows[0].replicas, settings))
    lines = [
        title,
        "",
        table(_HEADER, [_cells(row, options.tokens_per_step) for row in rows]),
        "",
        *_LEGEND,
        "",
        "Start the first one, or simulate it again:",
        "",
        *_commands(options, rows[0], load),
    ]
    return Answer(lines, {"options": [_values(row, options.tokens_per_step) for row in rows]})


def _load(options: PlanOptions) -> Load:
    if options.trace:
        arrivals = list(read_trace(options.trace))[: options.requests]
        if not arrivals:
            raise OptionError(f"--trace {options.trace} has no requests")
        longest = max(one.num_prompt_tokens + one.num_output_tokens for one in arrivals)
        if longest > options.context:
            raise OptionError(f"--context must be at least {longest}, as the trace, got {options.context}")
        return load_of(arrivals, options.context)
    mean_prompt = options.mean_prompt or options.context - options.mean_output
    if mean_prompt < 1 or mean_prompt + options.mean_output > options.context:
        raise OptionError(
            f"--context must hold a prompt and an answer, got {options.context} for "
            f"--mean-prompt {options.mean_prompt} and --mean-output {options.mean_output}"
        )
    traffic = Traffic(
        1.0, options.requests, mean_prompt, options.mean_output, seed=options.seed, varies=False
    )
    return load_of(list(traffic.arrivals()), options.context)


def _carried(options: PlanOptions, sized: Sequence[Deployment], load: Load, limits: Limits) -> list[Carried]:
    """Return what each deployment and policy carries. Raises OptionError if none carries anything."""
    machine_file = load_machine_file(options.machine)
    policies = [
        policy_of(options, name, min(options.slot_capacity, options.context)).resolve(options.context)
        for name in options.policy
    ]
    tried = [
        candidate
        for one in sized
        for policy in policies
        for candidate in candidates(
            _priced(one, options), policy, load, limits, _choices(options, one, policy, load)
        )
    ]
    if not tried:
        slots = [DecodeShape.of(policy, 1) for policy in policies]
        try:
            fitting(sized[-1], min(slots, key=lambda slot: slot.sequence_bytes(sized[-1].model)))
        except DoesNotFitError as error:
            raise _too_large(options, sized, error) from error
    found = [carry_most(candidate, load, limits, machine_file) for candidate in tried]
    carried = [one for one in found if one is not None and one.token_rate >= (options.min_rate or 0.0)]
    if not carried:
        raise OptionError(_unmet(options, sized, policies, load, [one for one in found if one is not None]))
    return carried


def _too_large(options: PlanOptions, sized: Sequence[Deployment], error: DoesNotFitError) -> OptionError:
    sockets = f"{sized[-1].num_sockets} sockets of {options.machine}"
    return OptionError(
        f"{options.model} on {sockets} {error}; --nodes, --weight-dtype int8 and --uses-ddr may help"
    )


def _choices(options: PlanOptions, deployment: Deployment, policy: Any, load: Load) -> Candidate:
    candidate = replace(candidate_of(options, deployment, policy, load), is_split=options.split)
    if candidate.switching is not None:
        for name in ("split", "kubernetes"):
            if getattr(options, name):
                raise OptionError(f"--{name} is of one model, and --other-models has more")
    for one in candidate.deployments:
        one.model.check_context(options.context)
    return candidate


def _priced(deployment: Deployment, options: PlanOptions) -> Deployment:
    machine = deployment.machine
    price = machine.price if options.price is None else options.price
    power = machine.power if options.power is None else options.power
    return replace(deployment, machine=replace(machine, price=price, power=power))


def _unmet(
    options: PlanOptions, sized: Sequence[Deployment], policies: Any, load: Load, carried: Sequence[Carried]
) -> str:
    """Return the limits that no deployment meets, each with the best value of one request alone.

    If one request alone meets each of them, they are all named: none carries a load within them. Raises
    OptionError if no deployment has room for one.
    """
    alone: list[tuple[float, float]] = []
    for one in sized:
        for policy in policies:
            candidate = _choices(options, one, policy, load)
            try:
                alone.append((candidate.prompt_seconds(load), candidate.step_seconds(load)))
            except DoesNotFitError as error:
                misfit = error
    if not alone:
        raise _too_large(options, sized, misfit)
    ttft, tpot = (min(values) for values in zip(*alone, strict=True))
    limits = (
        ("--max-ttft", options.max_ttft, ttft),
        ("--max-tpot", options.max_tpot, tpot),
        ("--max-e2e", options.max_e2e, ttft + load.mean_output * tpot),
    )
    given = [(flag, limit, best) for flag, limit, best in limits if limit is not None]
    missed = [(flag, limit, best) for flag, limit, best in given if best > limit] or given
    unmet = " and ".join(f"{flag} {limit:g} (best alone: {best:.4g})" for flag, limit, best in missed)
    if carried:
        best = max(one.token_rate for one in carried)
        unmet = f"--min-rate {options.min_rate:g} (best of any: {best:.4g})"
    return f"none of {len(sized) * len(policies)} deployments meets {unmet or 'the load'}"


_HEADER = (
    "",
    "replicas",
    "sockets",
    "policy",
    "entries",
    "slots",
    "users",
    "requests/s",
    "goodput",
    "bound",
    "tok/s",
    "with drafts",
    "TTFT s",
    "TPOT ms",
    "busy",
    "slots used",
    "$/Mtok",
    "kWh/Mtok",
)


_LEGEND = (
    "* on the Pareto front of tokens/s for a user and tokens/s of a socket",
    "Of one replica: users: requests under way at once; requests/s: the most within the limits, or, with",
    "--split, its part of --rate; goodput: those within all limits; busy: share of the time; bound: the rate",
    "at which it is never idle, and its range with one unpublished number at an end of its own.",
)


def _cells(row: _Row, tokens_per_step: float) -> tuple[str, ...]:
    one = row.carried
    candidate = one.candidate
    dollars, energy = one.dollars_per_million, one.kilowatt_hours_per_million
    decode = candidate.deployment.num_all_sockets
    split = f"{decode}+{one.num_prefill_nodes * decode}" if candidate.is_split else str(decode)
    return (
        "*" if row.is_on_front else "",
        str(row.replicas),
        split,
        candidate.policy.name,
        str(candidate.policy.capacity),
        str(candidate.num_slots),
        f"{one.users:.1f}",
        f"{one.rate:.3g}",
        f"{one.goodput:.3g}",
        f"{one.bound:.3g} ({one.bound_low:.2g} to {one.bound_high:.2g})",
        f"{one.token_rate:.4g}",
        f"{_with_drafts(one, tokens_per_step):.4g}" if tokens_per_step > 1 else "-",
        f"{percentile(one.record.time_to_first_token, 50) or 0:.3g}",
        f"{1e3 * one.tpot:.3g}",
        f"{one.record.busy_seconds / one.record.seconds:.0%}",
        f"{one.record.slot_seconds / one.record.seconds / candidate.num_slots:.0%}",
        f"{dollars:.3g}" if dollars is not None else "-",
        f"{energy:.3g}" if energy is not None else "-",
    )


def _with_drafts(one: Carried, tokens_per_step: float) -> float:
    """Return tokens/s if each decode step made this number of tokens in the same time.

    The share of prefill stays.
    """
    decode = one.record.decode_seconds / one.record.seconds
    return one.token_rate / (1 - decode + decode / tokens_per_step)


def _label(row: _Row) -> str:
    candidate = row.carried.candidate
    num_sockets = candidate.deployment.num_all_sockets
    return f"{num_sockets} sockets, {candidate.policy.name}, {candidate.num_slots} slots"


def _commands(options: PlanOptions, row: _Row, load: Load) -> list[str]:
    """Return the flags of `serve`, and the `replay` whose rate is within a tenth, with other arrivals."""
    candidate = row.carried.candidate
    served = " --speculative-prefill-model DRAFT" if options.speculative_prefill_model is not None else ""
    lines = [f"snapserve serve --model MODEL{served} {_flags(_settings(options, row, load))}"]
    if options.draft_model is not None:
        lines = ["snapserve serve has no speculative decoding, so it does not reach these rates"]
    if options.other_models:
        lines = ["snapserve serve has one model, so it does not switch between several"]
    if not options.trace and not candidate.is_split:
        record = row.carried.record
        lines.append(
            f"snapserve simulate replay --model {options.model} --machine {options.machine} "
            f"--sockets {candidate.deployment.num_sockets} --execution {candidate.deployment.execution} "
            f"{_flags(_sizes(candidate, load))}{_given(options)} --rate {row.carried.rate:.4g} "
            f"--requests {len(record.end_times)} --shape poisson --mean-prompt {load.mean_prompt} "
            f"--mean-output {options.mean_output} --no-varies"
        )
    return lines


_NAMED = {"as_json", "model", "machine", "execution", "slot_capacity", "mean_output", "trace"}


def _given(options: PlanOptions) -> str:
    """Return the flags of `replay` that are given to `plan` and that `_commands` does not name."""
    flags = ""
    for name, field in ServingOptions.model_fields.items():
        value = getattr(options, name)
        if name not in _NAMED and value != field.default:
            flag = f" --{name.replace('_', '-')}"
            text = ",".join(value) if isinstance(value, tuple) else f"{value}"
            flags += flag if value is True else f"{flag} {text}"
    return flags


def _sizes(candidate: Candidate, load: Load) -> dict[str, str]:
    """Return the options that `serve` and `replay` share, by the names of their flags."""
    sizes = {"num-slots": str(candidate.num_slots), "policy": str(candidate.policy.name)}
    if candidate.policy.evicts or candidate.policy.scorer:
        sizes["slot-capacity"] = str(candidate.policy.layout.capacity)
    return sizes | {"max-model-len": str(load.max_model_len)}


def _settings(options: PlanOptions, row: _Row, load: Load) -> dict[str, str]:
    """Return the options of `serve`, by the names of their flags."""
    candidate = row.carried.candidate
    settings = {"prefill-chunk": str(options.prefill_chunk)}
    if options.max_inter_token_latency != PlanOptions.model_fields["max_inter_token_latency"].default:
        settings["max-inter-token-latency"] = f"{options.max_inter_token_latency:g}"
    if candidate.drafting is not None:
        settings["speculative-prefill-threshold"] = str(candidate.drafting.threshold)
        settings["speculative-prefill-keep"] = f"{candidate.drafting.keep:g}"
    if options.kv_cache_dtype is not KVCacheDtype.AUTO:
        settings["kv-cache-dtype"] = options.kv_cache_dtype
    if options.weight_dtype is WeightDtype.INT8:
        settings["quantization"] = options.weight_dtype
    return _sizes(candidate, load) | settings


def _flags(settings: Mapping[str, str]) -> str:
    return " ".join(f"--{flag} {value}" for flag, value in settings.items())


def _values(row: _Row, tokens_per_step: float) -> dict[str, Any]:
    one = row.carried
    candidate, record = one.candidate, one.record
    return {
        "replicas": row.replicas,
        "num_sockets": candidate.deployment.num_all_sockets,
        "num_prefill_sockets": one.num_sockets - candidate.deployment.num_all_sockets,
        "execution": candidate.deployment.execution,
        "policy": candidate.policy.name,
        "slot_capacity": candidate.policy.capacity,
        "num_slots": candidate.num_slots,
        "users": one.users,
        "requests_per_second": one.rate,
        "goodput": one.goodput,
        "bound": one.bound,
        "bound_range": [one.bound_low, one.bound_high],
        "tokens_per_second": one.token_rate,
        "tokens_per_second_with_drafts": _with_drafts(one, tokens_per_step),
        "ttft_seconds": percentile(record.time_to_first_token, 50),
        "tpot_seconds": one.tpot,
        "busy": record.busy_seconds / record.seconds,
        "slot_use": record.slot_seconds / record.seconds / candidate.num_slots,
        "restored": record.num_restored_tokens / record.num_prompt_tokens,
        "dollars_per_million_tokens": one.dollars_per_million,
        "kilowatt_hours_per_million_tokens": one.kilowatt_hours_per_million,
        "is_on_front": row.is_on_front,
    }
