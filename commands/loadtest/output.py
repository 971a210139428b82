"""The output of `snapserve bench`: a table, and on request JSON and a plot."""

import sys

from commands.loadtest.comparison import Comparison
from commands.loadtest.config import BenchConfig
from commands.loadtest.measure import Result
from commands.loadtest.plot import plot
from commands.loadtest.report import Report
from commands.loadtest.table import comparison_table, report_table
from commands.shared.files import write_json


def write_results(config: BenchConfig, result: Result) -> None:
    """Write the requested outputs. The table goes to standard error if JSON goes to standard output.

    Raises `OptionError` for a file that cannot be written.
    """
    figures = result.figures
    reports_by_server = _reports_by_server(config, figures)
    if isinstance(figures, Comparison):
        base, compare = reports_by_server
        table = comparison_table(figures, (base, compare))
    else:
        table = report_table(figures)
    print(
        _headline(result.description),
        table,
        sep="\n",
        end="",
        file=sys.stderr if config.json_path == "-" else sys.stdout,
    )
    if config.json_path is not None:
        write_json(result.as_json(), config.json_path, indent=2)
    if config.plot_path is not None:
        plot({name: _pooled(reports) for name, reports in reports_by_server.items()}, config.plot_path)


def _reports_by_server(config: BenchConfig, figures: Report | Comparison) -> dict[str, list[Report]]:
    """Return the reports by the server's name.

    The names differ even when a server is compared with itself.
    """
    if isinstance(figures, Report):
        return {config.base.base_url: [figures]}
    assert config.compare is not None
    return {config.base.base_url: figures.base, f"against {config.compare.base_url}": figures.compare}


def _pooled(reports: list[Report]) -> dict[str, list[float]]:
    """Return the samples of all rounds by metric."""
    return {
        metric: [value for report in reports for value in report.samples[metric]]
        for metric in reports[0].samples
    }


def _headline(description: dict[str, object]) -> str:
    return (
        f"{description['model_id']} at {description['base_url']}{description['endpoint']}: "
        f"{description['num_prompts']} requests ({description['prompts']}), "
        f"{description['request_rate']} per second, "
        f"{description['max_concurrency'] or 'any number'} at once\n"
    )
