"""How many of the host's processors this process may use at once."""

import os
from pathlib import Path


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return the limit of Linux' control groups in processors, such as a container's; None without one.

    A group's limit holds for the groups in it too, so the lowest of them counts.
    """
    limits = [limit for folder in _groups(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def num_threads(root: Path = Path("/")) -> int | None:
    """Return how many threads to compute with where the limit is below the processors that are seen.

    More would be stopped together for the rest of each period. None: as many as there are processors.
    """
    limit = cpu_limit(root)
    if limit is None or limit >= len(os.sched_getaffinity(0)):
        return None
    return max(int(limit), 1)


def _groups(root: Path) -> list[Path]:
    """Return the folders of the process's control group and of those around it, and version 1's."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    # Version 2 has one line, `0::/path`. In a container the path may be one that is not seen there.
    name = next((line[3:] for line in lines if line.startswith("0::")), "/").lstrip("/")
    return [mount / name, *(mount / name).parents[: len(Path(name).parts)], mount / "cpu"]


def _limit(folder: Path) -> float | None:
    try:
        quota, period = map(float, (folder / "cpu.max").read_text().split())
        return quota / period
    except (OSError, ValueError):  # no such file, or "max"
        pass
    try:
        quota = float((folder / "cpu.cfs_quota_us").read_text())
        period = float((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
