"""What a measurement leaves behind: a table, JSON, a plot."""

import json
import sys
from pathlib import Path

from commands.loadtest.comparison import Comparison
from commands.loadtest.config import BenchConfig
from commands.loadtest.measure import Result
from commands.loadtest.plot import plot
from commands.loadtest.report import Report
from commands.loadtest.table import comparison_table, report_table
from server.options.command_line import OptionError


def tell(config: BenchConfig, result: Result) -> None:
    """Write what was asked for; the table leaves the standard output to JSON. Raises `OptionError` for a file that cannot be written."""
    sides = _sides(config, result.figures)
    names, figures = tuple(sides), result.figures
    table = (
        comparison_table(figures, (names[0], names[1]))
        if isinstance(figures, Comparison)
        else report_table(figures)
    )
    print(
        _headline(result.description),
        table,
        sep="\n",
        end="",
        file=sys.stderr if config.json_path == "-" else sys.stdout,
    )
    if config.json_path is not None:
        _write_json(result, config.json_path)
    if config.plot_path is not None:
        plot({name: _pooled(reports) for name, reports in sides.items()}, config.plot_path)


def _sides(config: BenchConfig, figures: Report | Comparison) -> dict[str, list[Report]]:
    """Return every server's reports by a name for it; the same server twice is two sides."""
    if isinstance(figures, Report):
        return {config.base.base_url: [figures]}
    assert config.compare is not None
    return {config.base.base_url: figures.base, f"against {config.compare.base_url}": figures.compare}


def _pooled(reports: list[Report]) -> dict[str, list[float]]:
    return {
        metric: [value for report in reports for value in report.samples[metric]]
        for metric in reports[0].samples
    }


def _headline(description: dict[str, object]) -> str:
    return (
        f"{description['model_id']} at {description['base_url']}{description['endpoint']}: {description['num_prompts']} requests "
        f"({description['prompts']}), {description['request_rate']} per second, {description['max_concurrency'] or 'any number'} at once\n"
    )


def _write_json(result: Result, path: str) -> None:
    document = json.dumps(result.as_json(), indent=2) + "\n"
    if path == "-":
        sys.stdout.write(document)
        return
    try:
        Path(path).write_text(document)
    except OSError as error:
        raise OptionError(f"--json {path} cannot be written: {error}") from error
