"""`replay`: the latencies and throughput of a trace of requests."""

import csv
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from backends.sn40l.description.hardware import load_machine_file
from backends.sn40l.step.cost_model import DeploymentCost
from backends.sn40l.step.decode import decode_seconds
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.prefill import Chunk, prefill_seconds
from backends.sn40l.step.ranges import Range, value_range
from backends.timed import CostModel
from cache.policy import CachePolicy
from commands.shared.table import percentile, table
from commands.simulate.answer import Answer
from commands.simulate.arrivals import Arrival, Traffic, read_trace
from commands.simulate.deployment import (
    drafting_of,
    policy_of,
    prompt_store,
    serving_deployment,
    speculation_of,
    switching_of,
)
from commands.simulate.options import ReplayOptions
from commands.simulate.replay import Replay, ReplayRecord, replay_config, replay_spec
from server.options.command_line import OptionError


def replay_answer(options: ReplayOptions) -> Answer:
    """Play a trace, write its series and plot on request, and return its percentiles and totals."""
    policy = policy_of(options.policy, options.slot_capacity).resolve(options.max_model_len)
    deployment = serving_deployment(options, options.sockets)
    switching = switching_of(options, deployment)
    if switching is not None and (options.series or options.plot):
        raise OptionError("--series and --plot are of one model, and --other-models has more")
    for one in (deployment,) if switching is None else switching.deployments:
        one.model.check_context(options.max_model_len)
    started = time.perf_counter()
    arrivals = list(_arrivals(options))
    if not arrivals:
        raise OptionError(f"--trace {options.trace} has no requests")
    # The times of published traces may be dates.
    start = min(arrival.time for arrival in arrivals)
    arrivals = [replace(arrival, time=arrival.time - start) for arrival in arrivals]
    record = _played(options, deployment, policy, arrivals)
    wall = time.perf_counter() - started
    _write_series(options, record)
    spread = _spread(options, deployment, policy, arrivals)
    ends = [record]
    if options.range:
        # Prompts and answers share the machine: what takes a request longest has the least throughput.
        ends += [_played(options, one, policy, arrivals) for one in (spread.lowest, spread.highest)]
    return _replay_answer(options, record, wall, spread, ends)


def _spread(
    options: ReplayOptions, deployment: Deployment, policy: CachePolicy, arrivals: Sequence[Arrival]
) -> Range:
    """Return the machine's seconds for a mean request, if all slots decode."""
    prompt, answer = (
        max(1, round(statistics.fmean(values)))
        for values in zip(*((one.num_prompt_tokens, one.num_output_tokens) for one in arrivals), strict=True)
    )
    # Longer sequences are refused.
    chunk = Chunk(min(prompt, options.max_model_len))
    entries = min(policy.layout.capacity, chunk.num_tokens + answer // 2)
    shape = DecodeShape(
        options.num_slots, policy.layout.capacity if deployment.machine.pads_decode else entries
    )

    def seconds(changed: Deployment) -> float:
        fused = replace(changed, execution=Execution.FUSED)
        return prefill_seconds(fused, chunk) + answer * decode_seconds(changed, shape) / options.num_slots

    return value_range(deployment, load_machine_file(options.machine).changes(), seconds)


def _played(
    options: ReplayOptions,
    deployment: Deployment,
    policy: CachePolicy,
    arrivals: Sequence[Arrival],
) -> ReplayRecord:
    """Return the replay of one model and of a draft that shortens its prompts, or of several in turn."""
    resident = _resident(options, arrivals, policy)
    switching = switching_of(options, deployment)
    if switching is not None:
        return switching.play(
            arrivals,
            policy,
            options.num_slots,
            options.max_model_len,
            options.max_inter_token_latency,
            resident,
        )
    drafting = drafting_of(options, deployment)
    store = prompt_store(options, deployment, arrivals)
    prefixes = store.spec if store is not None else None
    spec = replay_spec(options.num_slots, policy, options.max_model_len, prefixes)
    cost: CostModel = DeploymentCost(
        deployment, spec.pools[0], resident_entries=resident, speculation=speculation_of(options)
    )
    if drafting is not None:
        spec = drafting.spec(spec)
        cost = drafting.cost(cost, spec)
    config = replay_config(options.max_inter_token_latency)
    replay = Replay(spec, cost, config, collapses=options.collapse, store=store, drafting=drafting)
    return replay.run(arrivals)


def _resident(options: ReplayOptions, arrivals: Sequence[Arrival], policy: CachePolicy) -> int | None:
    """Return the entries that a sequence holds on average, if memory is charged for them."""
    if not options.paged:
        return None
    held = statistics.fmean(one.num_prompt_tokens + one.num_output_tokens / 2 for one in arrivals)
    return max(1, min(round(held), policy.layout.capacity))


def _arrivals(options: ReplayOptions) -> Iterable[Arrival]:
    if options.trace:
        given = [
            name for name in _DRAWN if getattr(options, name) != type(options).model_fields[name].default
        ]
        if given:
            raise OptionError(f"--{given[0].replace('_', '-')} is of drawn arrivals, and --trace has its own")
        return read_trace(options.trace)
    traffic = Traffic(
        options.rate,
        options.requests,
        options.mean_prompt,
        options.mean_output,
        options.shape,
        options.seed,
        options.varies,
    )
    return traffic.arrivals()


_DRAWN = ("shape", "rate", "requests", "mean_prompt", "mean_output", "seed", "varies")


def _write_series(options: ReplayOptions, record: ReplayRecord) -> None:
    """Write queue and slot use over time as CSV and as a plot, where they were requested."""
    samples = record.samples
    if options.series:
        with options.series.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("simulated_seconds", "num_waiting", "num_slots_in_use"))
            writer.writerows((sample.time, sample.num_waiting, sample.num_slots_in_use) for sample in samples)
    if options.plot:
        from backends.sn40l.plots import draw_replay

        draw_replay(
            options.plot,
            [sample.time for sample in samples],
            [sample.num_waiting for sample in samples],
            [sample.num_slots_in_use for sample in samples],
        )


def _replay_answer(
    options: ReplayOptions, record: ReplayRecord, wall: float, spread: Range, ends: Sequence[ReplayRecord]
) -> Answer:
    """Return the percentiles and totals. `ends` are the replays at the ends of the range, too."""
    num_slots = options.num_slots
    measures = {
        "ttft_seconds": record.time_to_first_token,
        "tpot_seconds": record.time_per_output_token,
        "e2e_seconds": record.end_to_end,
        "queue_seconds": record.queue_time,
    }
    percentiles = {
        name: {"mean": statistics.fmean(values) if values else None}
        | {f"p{rank}": percentile(values, rank) for rank in (50, 90, 99)}
        for name, values in measures.items()
    }
    totals = {
        "requests": len(record.end_times),
        "refused": record.num_refused,
        "prompt_tokens": record.num_prompt_tokens,
        "removed_prompt_tokens": record.num_removed_tokens,
        "restored_prompt_tokens": record.num_restored_tokens,
        "output_tokens": record.num_output_tokens,
        "simulated_seconds": record.seconds,
        "output_tokens_per_second": record.num_output_tokens / record.seconds if record.seconds else 0.0,
        "slot_use": record.slot_seconds / (record.seconds * num_slots) if record.seconds else 0.0,
        "most_waiting_sampled": max((sample.num_waiting for sample in record.samples), default=0),
        "device_steps": record.num_steps,
        "launches": record.num_launches,
        "switches": record.num_switches,
        "switch_seconds": record.switch_seconds,
        "wall_seconds": wall,
    }
    rows = [
        (name, *(f"{value:.4g}" if value is not None else "-" for value in row.values()))
        for name, row in percentiles.items()
    ]
    ranges = {"machine_seconds_per_request": [spread.low, spread.high]}
    if options.range:
        ranges |= {
            "ttft_seconds_p50": _ends(percentile(one.time_to_first_token, 50) for one in ends),
            "tpot_seconds_p50": _ends(percentile(one.time_per_output_token, 50) for one in ends),
            "e2e_seconds_p50": _ends(percentile(one.end_to_end, 50) for one in ends),
            "output_tokens_per_second": _ends(one.num_output_tokens / one.seconds for one in ends),
        }
    lines = [
        *(f"{name:26} {value:,.6g}" for name, value in totals.items()),
        "",
        table(("seconds", "mean", "p50", "p90", "p99"), rows),
        "",
        "with one unpublished number of the machine at an end of its range:",
        *(f"{name:28} {low:.4g} to {high:.4g}" for name, (low, high) in ranges.items()),
    ]
    # A replay in which nothing was served says nothing about the deployment.
    return Answer(lines, totals | percentiles | {"ranges": ranges}, status=0 if record.end_times else 1)


def _ends(values: Iterable[float | None]) -> list[float]:
    found = [value for value in values if value is not None]
    return [min(found, default=0.0), max(found, default=0.0)]
