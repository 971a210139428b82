"""The tables of `snapserve bench`."""

from collections.abc import Iterable, Mapping, Sequence

from commands.loadtest.comparison import Comparison, medians, ratios
from commands.loadtest.report import METRICS, Figure, Report

_TOTALS = {
    "completed": "Requests completed",
    "failed": "Requests failed",
    "without_text": "Answers without any text",
    "duration": "Duration (s)",
    "total_input_tokens": "Input tokens",
    "total_output_tokens": "Output tokens",
    "request_throughput": "Requests per second",
    "output_throughput": "Output tokens per second",
    "total_token_throughput": "Input and output tokens per second",
}


def report_table(report: Report) -> str:
    statistics = _statistics(report.figures)
    latencies = [["Latency (ms)", *statistics]]
    latencies += [
        [metric.upper(), *(_shown(report.figures[f"{statistic}_{metric}_ms"]) for statistic in statistics)]
        for metric in METRICS
    ]
    totals = [[title, _shown(report.figures[name])] for name, title in _TOTALS.items()]
    return "\n".join((_aligned(totals), _aligned(latencies))) + _failures([report])


def comparison_table(comparison: Comparison, names: tuple[str, str]) -> str:
    """Return the medians of both servers, and the ratio of the first to the second.

    For throughput a ratio above 1 is better, for latencies one below 1.
    """
    base = [report.figures for report in comparison.base]
    compare = [report.figures for report in comparison.compare]
    columns = (medians(base), medians(compare), ratios(base, compare))
    titles = dict(_TOTALS)
    for metric in METRICS:
        titles |= {
            f"{statistic}_{metric}_ms": f"{metric.upper()} (ms), {statistic}"
            for statistic in _statistics(columns[0])
        }
    rows = [["Median of rounds", *names, "ratio"]]
    rows += [[title, *(_shown(column[name]) for column in columns)] for name, title in titles.items()]
    return _aligned(rows) + _failures(comparison.reports)


def _statistics(figures: Mapping[str, Figure]) -> list[str]:
    """Return the statistics of a latency without the standard deviation: latencies are far from normal."""
    suffix = f"_{METRICS[0]}_ms"
    return [
        name.removesuffix(suffix) for name in figures if name.endswith(suffix) and not name.startswith("std")
    ]


def _failures(reports: Iterable[Report]) -> str:
    lines = [
        f"  {count} × {reason}: {report.examples[reason]}".rstrip(": ")
        for report in reports
        for reason, count in sorted(report.failures.items())
    ]
    return "\n".join(["", "Failed requests:", *lines, ""]) if lines else ""


def _shown(figure: Figure) -> str:
    if figure is None:
        return "-"
    return str(figure) if isinstance(figure, int) else f"{figure:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in rows)
    return "\n".join(lines) + "\n"
