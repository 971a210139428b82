"""Plain-text tables and percentiles."""

import math
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table. Each column is as wide as its widest cell."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join((lines[0], "-" * len(lines[0]), *lines[1:]))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the nearest-rank percentile, or None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else None
