"""The host's memory: how much is available, and how much of it stored prompts take."""

from pathlib import Path

_DEFAULT_SHARE = 10  # stored prompts take a tenth
_DEFAULT_LIMIT = 4 << 30


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return what Linux calls available memory, within the control group's limit; None if unknown."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        group = root / "sys/fs/cgroup"
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        # Pages of files that were read, such as the weights', are reclaimed when memory is needed.
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):  # no control group, or "max"
        pass
    return max(free, 0)


def prefix_bytes(configured: int | None, available: int | None) -> int:
    """Return the bytes for stored prompts: as configured, or for None a tenth of `available`, at most 4 GiB.

    Nothing is stored by default where the available memory is unknown.
    """
    if configured is not None:
        return configured
    return min((available or 0) // _DEFAULT_SHARE, _DEFAULT_LIMIT)


def fitting_prefix_bytes(configured: int | None, available: int | None, taken: int) -> int:
    """Return the bytes for stored prompts beside the `taken` bytes of slots and scratches.

    Raises ValueError if those that are configured do not fit.
    """
    wanted = prefix_bytes(configured, available)
    if available is None:
        return wanted
    left = max(available - taken, 0)
    if configured is not None and wanted > left:
        raise ValueError(
            f"prefix_cache_bytes must be at most {left}: {available} bytes are available, and slots and "
            f"scratches take {taken} of them; got {wanted}"
        )
    return min(wanted, left)
