"""Figures of runs with known latencies, compared with numpy's statistics and with sums by hand."""

import random

import numpy as np
import pytest

from commands.loadtest.answer import Answer, Failure
from commands.loadtest.comparison import Comparison, medians, ratios
from commands.loadtest.report import Report, make_report, percentile
from commands.loadtest.run import Run
from commands.loadtest.table import comparison_table, report_table

QUICK = Answer(0.0, (0.1, 0.2, 0.3), 0.3, 10, 3)  # TTFT 100 ms, TPOT 100, E2EL 300
SLOW = Answer(1.0, (1.3, 1.7), 2.3, 20, 5)  # TTFT 300 ms, TPOT 250, E2EL 1300
SILENT = Answer(0.0, (), 0.7, 30, 4)  # E2EL 700 ms alone
RUN = Run(
    (
        QUICK,
        Failure("HTTP 429", "full"),
        SLOW,
        SILENT,
        Failure("HTTP 429", "still full"),
        Failure("time limit", "late"),
    ),
    4.0,
)


def test_totals_count_completed_requests() -> None:
    figures = make_report(RUN, (50.0,)).figures
    expected = {
        "completed": 3,
        "failed": 3,
        "without_text": 1,
        "total_input_tokens": 60,
        "total_output_tokens": 12,
        "request_throughput": 0.75,
        "output_throughput": 3.0,
        "total_token_throughput": 18.0,
        "duration": 4.0,
    }
    assert {name: figures[name] for name in expected} == expected


def test_latencies_have_the_names_of_vllm_bench_serve() -> None:
    figures = make_report(RUN, (50.0, 90.0, 99.9)).figures
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p50", "p90", "p99.9"):
            assert figures[f"{statistic}_{metric}_ms"] is not None
        assert figures[f"p50_{metric}_ms"] == pytest.approx(figures[f"median_{metric}_ms"])


def test_latencies_equal_sums_by_hand() -> None:
    figures = make_report(RUN, (90.0,)).figures
    expected = {
        "mean_ttft_ms": 200,
        "std_ttft_ms": 100,
        "p90_ttft_ms": 280,
        "mean_tpot_ms": 175,
        "median_itl_ms": 100,
        "mean_itl_ms": 200,
        "median_e2el_ms": 700,
        "p90_e2el_ms": 1180,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    source = random.Random(count)
    values = [source.expovariate(1.0) for _ in range(count)]
    for percent in (0, 1, 50, 90, 99, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_failures_are_counted_by_reason_each_with_its_first_message() -> None:
    report = make_report(RUN, (99.0,))
    assert report.as_json()["failures"] == {"HTTP 429": 2, "time limit": 1}
    assert report.as_json()["failure_examples"] == {"HTTP 429": "full", "time limit": "late"}
    assert "2 × HTTP 429: full" in report_table(report)


def test_a_run_without_an_answer_has_no_latencies_rather_than_zeros() -> None:
    report = make_report(Run((Failure("HTTP 503"),), 1.0), (99.0,))
    assert report.figures["completed"] == 0
    assert report.figures["mean_ttft_ms"] is None
    assert report.figures["p99_e2el_ms"] is None
    assert "1 × HTTP 503\n" in report_table(report)


def report_of(output_throughput: float, tpot: float | None) -> Report:
    figures = make_report(Run((QUICK,), 1.0), (99.0,)).figures
    return Report({**figures, "output_throughput": output_throughput, "mean_tpot_ms": tpot}, {}, {}, {})


def test_ratios_are_taken_within_a_round() -> None:
    """Round 2 is slow: the ratio of the medians is 60 / 50, the ratios of the rounds are 2, 2 and 1."""
    base = [report_of(100.0, 1.0), report_of(40.0, 4.0), report_of(60.0, None)]
    compare = [report_of(50.0, 2.0), report_of(20.0, 2.0), report_of(60.0, 3.0)]
    both = Comparison(base, compare)
    document = both.as_json()
    assert document["rounds"] == 3
    assert isinstance(document["ratios"], dict)
    assert document["ratios"]["output_throughput"] == 2
    assert document["ratios"]["mean_tpot_ms"] == 1.25
    assert document["ratios"]["failed"] is None
    assert medians([report.figures for report in base])["output_throughput"] == 60
    row = next(
        line
        for line in comparison_table(both, ("here", "there")).splitlines()
        if line.startswith("Output tokens per second")
    )
    assert row.split()[-3:] == ["60.00", "50.00", "2.00"]


def test_ratios_skip_figures_that_one_server_lacks() -> None:
    assert ratios([{"a": 1.0, "b": 2.0}], [{"a": 4.0}]) == {"a": 0.25}
    assert ratios([{"a": None}], [{"a": 4.0}]) == {"a": None}
