"""The processors of a container, by the files of its control group."""

import os
from pathlib import Path

import pytest

from backends.host_cpus import cpu_limit, num_threads


def host(root: Path, group: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": group, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("group", "files", "limit"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "50000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 1"}, 0.5),
        ("0::/a/b\n", {"sys/fs/cgroup/cpu.max": "300000 100000"}, 3),  # the path is another namespace's
        (
            "4:cpu,cpuacct:/\n",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        (
            "4:cpu,cpuacct:/\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
    ],
)
def test_the_limit_of_a_control_group(
    tmp_path: Path, group: str, files: dict[str, str], limit: float | None
) -> None:
    assert cpu_limit(host(tmp_path, group, files)) == limit


def test_threads_follow_a_limit_below_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = host(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000"})
    for num_seen, expected in ((64, 2), (2, None)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=num_seen: set(range(count)))
        assert num_threads(root) == expected
    host(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000"})
    assert num_threads(root) == 1
    assert num_threads(tmp_path / "elsewhere") is None
