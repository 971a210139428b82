"""`replay`: the latencies and throughput of a trace of requests."""

import csv
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from backends.sn40l.description.hardware import load_machine_file
from backends.sn40l.step.placement import DoesNotFitError, max_batch
from backends.sn40l.step.ranges import Range, value_range
from commands.shared.table import percentile, table
from commands.simulate.answer import Answer
from commands.simulate.arrivals import Arrival, Traffic, read_trace
from commands.simulate.deployment import candidate_of, policy_of, serving_deployment
from commands.simulate.load import Load, mean_restored
from commands.simulate.options import ReplayOptions
from commands.simulate.replay import ReplayRecord
from server.options.command_line import OptionError

_SAMPLE_INTERVAL = 60.0  # seconds between two rows of the series


def replay_answer(options: ReplayOptions) -> Answer:
    """Play a trace, write its series and plot on request, and return its percentiles and totals."""
    policy = policy_of(options, options.policy, options.slot_capacity).resolve(options.max_model_len)
    deployment = serving_deployment(options, options.sockets)
    if options.other_models and (options.series or options.plot):
        raise OptionError("--series and --plot are of one model, and --other-models has more")
    started = time.perf_counter()
    arrivals = list(_arrivals(options))
    if not arrivals:
        raise OptionError(f"--trace {options.trace} has no requests")
    # The times of published traces may be dates.
    start = min(arrival.time for arrival in arrivals)
    arrivals = [replace(arrival, time=arrival.time - start) for arrival in arrivals]
    load = _load(arrivals, options.max_model_len)
    candidate = candidate_of(options, deployment, policy, load, options.num_slots)
    for one in candidate.deployments:
        one.model.check_context(options.max_model_len)
    try:
        record = candidate.play(arrivals, load, collapses=options.collapse, sample_interval=_SAMPLE_INTERVAL)
    except DoesNotFitError as error:
        slot = candidate.shape(load, 1)
        most = min(max_batch(one, slot) for one in candidate.deployments)
        raise OptionError(f"{error}; --num-slots {most} would fit" if most else f"{error}") from error
    wall = time.perf_counter() - started
    _write_series(options, record)
    changes = load_machine_file(options.machine).changes()
    spread = value_range(deployment, changes, lambda changed: candidate.on(changed).request_seconds(load))
    ends = [record]
    if options.range:
        # Prompts and answers share the machine: what takes a request longest has the least throughput.
        ends += [
            candidate.on(one).play(arrivals, load, collapses=options.collapse)
            for one in (spread.lowest, spread.highest)
        ]
    return _replay_answer(options, record, wall, spread, ends)


def _load(arrivals: Sequence[Arrival], max_model_len: int) -> Load:
    """Return the load of the requests that are not refused for their length, or else of all."""
    served = [one for one in arrivals if one.num_prompt_tokens + one.num_output_tokens <= max_model_len]
    served = served or list(arrivals)
    return Load(tuple(served), max_model_len, mean_restored(served))


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
        "with one unpublished number of the machine at an end of its range",
        "(seconds per request: of a mean one, if all slots decode, without switches of models):",
        *(f"{name:28} {low:.4g} to {high:.4g}" for name, (low, high) in ranges.items()),
    ]
    # A replay in which nothing was served says nothing about the deployment.
    return Answer(lines, totals | percentiles | {"ranges": ranges}, status=0 if record.end_times else 1)


def _ends(values: Iterable[float | None]) -> list[float]:
    found = [value for value in values if value is not None]
    return [min(found, default=0.0), max(found, default=0.0)]
