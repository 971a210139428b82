"""The published figures, and the same quantities from this model.

`data/figures.toml` has the figures, the modules beside it compute ours. `judgement` says which of them test
the model.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from backends.sn40l.evidence import calls, decode, r1, speculation, vllm
from backends.sn40l.evidence.figures import Figure, Null, Value

MACHINES = ("sn40l", "dgx-h100", "a100", "h100", "a100-80gb")
"""The machines of published figures."""


@cache
def published_figures() -> tuple[Figure, ...]:
    """Return every published figure that the model covers."""
    rows = _file()["figures"]
    published = {key: _ends(row)[0] for key, row in rows.items()}
    values: dict[str, Value] = {
        **decode.values(),
        **r1.values(),
        **vllm.values(),
        **calls.values(),
        **speculation.values(published),
    }
    nulls: dict[str, tuple[Null, ...]] = {
        **decode.nulls(published),
        **r1.nulls(published),
        **vllm.nulls(published),
        **speculation.nulls(published),
    }
    assert values.keys() == rows.keys(), f"not both published and computed: {values.keys() ^ rows.keys()}"
    return tuple(_figure(key, row, values[key], nulls.get(key, ())) for key, row in rows.items())


def left_out() -> Mapping[str, str]:
    """Return the published figures that the model does not compute, and why."""
    reasons: dict[str, str] = _file()["left_out"]
    return reasons


def _file() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("data", "figures.toml").read_text())


def _figure(key: str, row: dict[str, Any], compute: Value, nulls: tuple[Null, ...]) -> Figure:
    low, high = _ends(row)
    given = {name: value for name, value in row.items() if name not in ("published", "nulls")}
    nulls = (*nulls, *row.get("nulls", {}).items())
    return Figure(key=key, low=low, high=high, compute=compute, nulls=nulls, **given)


def _ends(row: dict[str, Any]) -> tuple[float, float]:
    published = row["published"]
    low, high = published if isinstance(published, list) else (published, published)
    return float(low), float(high)
