"""The figures under other assumptions, for the two that the published figures of DeepSeek-R1 depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from backends.sn40l.description.hardware import Machine, MachineFile
from backends.sn40l.evidence.calibration import fit
from backends.sn40l.evidence.figures import Comparison, compare
from backends.sn40l.evidence.measures import TABLE_5, table_5_batch
from backends.sn40l.evidence.published import published_figures


@dataclass(frozen=True, slots=True)
class Alternative:
    """The figures with one global assumption changed and all parameters fitted again."""

    name: str
    comparisons: tuple[Comparison, ...]

    @property
    def worst(self) -> Comparison:
        return max(self.comparisons, key=lambda comparison: abs(comparison.error))


def expected_experts(machine_files: Mapping[str, MachineFile]) -> Alternative:
    """Return table 5 if a step read the expected number of experts, as a kernel with dynamic trips would."""
    file = machine_files["sn40l"]
    dynamic = replace(file, machine=replace(file.machine, reads_possible_experts=False))
    figures = tuple(
        figure
        for figure in published_figures()
        if figure.key.startswith("R1 ") and figure.key.endswith((": rate", ": gain"))
    )
    files = {**machine_files, "sn40l": dynamic}
    return Alternative("experts read as expected", compare(figures, fit(figures, files)))


def batches_without_reserve(machine: Machine) -> dict[int, tuple[int, int]]:
    """Return, by cache capacity, the batch of DeepSeek-R1 with no HBM kept free, and that published."""
    bare = replace(machine, hbm_reserve=0.0)
    published = {cell.entries: cell.batch for pair in TABLE_5 for cell in pair}
    return {
        entries: (table_5_batch(bare, entries), batch)
        for entries, batch in sorted(published.items(), reverse=True)
    }


def pooled_sequences(machine: Machine, weight_bytes: float, slot_bytes: float, num_sockets: int) -> int:
    """Return how many slots the HBM of all sockets would hold as one memory, with nothing kept free."""
    return int((num_sockets * machine.hbm_capacity - weight_bytes) // slot_bytes)
