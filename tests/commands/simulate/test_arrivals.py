"""Traces: the formats of files, and the distributions of drawn traffic."""

import itertools
import json
import statistics
from pathlib import Path

import pytest

from commands.simulate.arrivals import Arrival, ShapeName, TraceError, Traffic, read_trace


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "ours.jsonl",
            (
                '{"time": 1.5, "num_prompt_tokens": 7, "num_output_tokens": 3}\n\n'
                '{"time": 2, "num_prompt_tokens": 1, "num_output_tokens": 1}'
            ),
        ),
        (
            "mooncake.jsonl",
            (
                '{"timestamp": 1500, "input_length": 7, "output_length": 3}\n'
                '{"timestamp": 2000, "input_length": 1, "output_length": 1}'
            ),
        ),
        (
            "burst.csv",
            (
                "Timestamp,Request tokens,Response tokens,Log Type\n"
                "1.5,7,3,API log\n1.7,9,0,API log\n2,1,1,API log\n"
            ),
        ),
    ],
)
def test_each_trace_format_is_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert list(read_trace(tmp_path / name)) == [Arrival(1.5, 7, 3), Arrival(2.0, 1, 1)]


def test_hash_ids_say_what_prompts_share(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [46, 47, 9]}')
    (arrival,) = read_trace(path)
    assert arrival == Arrival(0.0, 1100, 3, hash_ids=(46, 47, 9))
    assert arrival.block_ids == (46, 47)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"time": 0.0, "num_prompt_tokens": 5, "num_output_tokens": 1}, "time 0.0 is before 1.0"),
        ({"time": 2.0, "num_prompt_tokens": 0, "num_output_tokens": 1}, "at least one token"),
        ({"time": 2.0, "num_prompt_tokens": 5}, "'num_output_tokens' is missing"),
        ({"time": float("nan"), "num_prompt_tokens": 5, "num_output_tokens": 1}, "finite"),
        ([], r"expected a JSON object, got \[\]"),
        (
            {"timestamp": 2000, "input_length": 1024, "output_length": 1, "hash_ids": [1]},
            "one for each complete block of 512 tokens, got 1 for 1024",
        ),
        (
            {"timestamp": 2000, "input_length": 5, "output_length": 1, "hash_ids": [-1]},
            "hash_ids must be from 0",
        ),
        (
            {"timestamp": 2000, "input_length": 5, "output_length": 1, "hash_ids": ["a"]},
            r"hash_ids must be a list of whole numbers, got \['a'\]",
        ),
        ({"time": 2.0, "num_prompt_tokens": float("inf"), "num_output_tokens": 1}, "infinity"),
    ],
)
def test_an_invalid_request_is_reported_with_its_line(tmp_path: Path, entry: object, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 1, "num_prompt_tokens": 1, "num_output_tokens": 1}\n\n' + json.dumps(entry))
    with pytest.raises(TraceError, match=message) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.jsonl", "{broken", "line 1: Expecting property name"),
        ("trace.csv", "Timestamp,Request tokens,Response tokens\n1,5,5\n2,x,5\n", "line 3: invalid literal"),
        ("trace.csv", "a,b\n1,2\n", "line 2: 'time' is missing"),
        (
            "trace.csv",
            "Timestamp,Request tokens,Response tokens\n1,5\n",
            "line 2: 'Response tokens' is missing",
        ),
    ],
)
def test_an_unreadable_line_is_reported_with_its_number(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=message):
        list(read_trace(tmp_path / name))


@pytest.mark.parametrize("shape", ShapeName)
def test_drawn_traffic_has_the_requested_rate_and_lengths(shape: ShapeName) -> None:
    arrivals = list(Traffic(rate=1.0, num_requests=86400, shape=shape).arrivals())
    assert sum(arrival.time < 43200 for arrival in arrivals) == pytest.approx(43200, rel=0.02)
    assert statistics.fmean(arrival.num_prompt_tokens for arrival in arrivals) == pytest.approx(
        1000, rel=0.02
    )
    assert statistics.fmean(arrival.num_output_tokens for arrival in arrivals) == pytest.approx(200, rel=0.02)
    assert all(before.time <= after.time for before, after in itertools.pairwise(arrivals))


def test_day_and_bursts_peak_where_they_should() -> None:
    by_hour = [0] * 24
    for arrival in Traffic(rate=1.0, num_requests=80000, shape=ShapeName.DAY).arrivals():
        by_hour[int(arrival.time / 3600) % 24] += 1
    assert max(by_hour) == max(by_hour[10:14])
    assert by_hour[0] < by_hour[12] / 10
    in_burst = sum(
        arrival.time % 300 < 60
        for arrival in Traffic(rate=1.0, num_requests=20000, shape=ShapeName.BURSTS).arrivals()
    )
    assert in_burst / 20000 == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    "change",
    [{"rate": 0.0}, {"rate": -1.0}, {"rate": float("inf")}, {"num_requests": 0}, {"mean_prompt_tokens": 0.5}],
)
def test_invalid_traffic_is_refused(change: dict[str, object]) -> None:
    options: dict[str, object] = {"rate": 1.0, "num_requests": 1} | change
    with pytest.raises(TraceError):
        Traffic(**options)  # type: ignore[arg-type]
