"""The wheel, from which the image is made too, has the files that are not Python."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.mark.long
def test_the_wheel_has_all_files_of_the_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=300)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    listed = ["git", "ls-files", "server", "commands", "scheduler", "backends", "cache"]
    tracked = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert names >= set(tracked)
    assert {"server/routes/page_files/index.html", "server/routes/page_files/page.css"} <= names
