"""A plot of a soak: the server's memory and the number of requests sent, over time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.soak.run import WARM_SHARE


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result of `Soak.run`."""
    from matplotlib.figure import Figure

    minutes = [sample["seconds"] / 60 for sample in result["samples"]]
    figure = Figure(figsize=(8, 4), layout="constrained")
    memory = figure.subplots()
    for name in result["servers"]:
        sizes = [sample["memory"][name] / 2**20 for sample in result["samples"]]
        memory.plot(minutes, sizes, label=f"memory of {name}")
    if not result["num_kills"]:
        memory.axvspan(0, WARM_SHARE * minutes[-1], color="grey", alpha=0.1, label="warming up")
    memory.set(xlabel="minutes", ylabel="resident memory, MiB", title="A soak of the server")
    memory.set_ylim(bottom=0)
    sent = memory.twinx()
    sent.plot(minutes, [sample["sent"] for sample in result["samples"]], color="C1", label="requests")
    sent.set(ylabel="requests sent")
    sent.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path)
