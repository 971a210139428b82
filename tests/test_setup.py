"""`scripts/setup` with an interpreter that only writes down what it is called with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

# It is of the version in VERSION. `-m venv` copies it, and a build index is reached if REACHED is set.
STUB = f"""#!/bin/bash
case "$*" in
    "-c import sys; sys.exit"*) exec {sys.executable} -c "raise SystemExit(${{VERSION/./,}} < (3, 11))" ;;
    "-c import sys; print"*) cat "$0.version" 2> /dev/null || echo "$VERSION" ;;
    "-c import urllib"*) [ -n "$REACHED" ] ;;
    --version) echo "Python $VERSION" ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "$VERSION" > "$3/bin/python.version"
        echo : > "$3/bin/activate" ;;
    "-m pip install "*) echo "$*" >> calls ;;
    *) exit 9 ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stub = tmp_path / "stub"
    stub.write_text(STUB.replace("${VERSION/./,}", "(${VERSION/./,})"))
    stub.chmod(0o755)
    return tmp_path


def run(project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": "./stub", "VERSION": "3.12"} | variables
    script = ["bash", "-euo", "pipefail", "-c", '. scripts/setup ""; echo sourced']
    return subprocess.run(script, cwd=project, env=environment, capture_output=True, text=True, timeout=30)


def test_an_old_interpreter_is_refused_before_anything_is_made(project: Path) -> None:
    result = run(project, VERSION="3.10")
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed, and ./stub is 3.10" in result.stderr
    assert not (project / ".venv").exists()


def test_pytorch_comes_from_the_index_for_the_machine(project: Path) -> None:
    (project / "bin").mkdir()
    smi = project / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    with_gpu = f"{project / 'bin'}:{os.environ['PATH']}"
    assert run(project, REACHED="1").stdout == "sourced\n"
    run(project, REACHED="1", VERSION="3.13", PATH=with_gpu)
    result = run(project, VERSION="3.14", REACHED="")
    assert "is not reached; taking the build of the usual package index" in result.stderr
    torch = [line for line in (project / "calls").read_text().splitlines() if "torch==" in line]
    assert "--index-url https://download.pytorch.org/whl/cpu torch==" in torch[0]
    assert "--index-url https://download.pytorch.org/whl/cu130 torch==" in torch[1]
    assert "--index-url" not in torch[2]


def test_an_environment_of_another_version_is_made_anew_and_a_second_call_does_nothing(project: Path) -> None:
    run(project, TORCH_INDEX="")
    assert (project / ".venv/bin/python.version").read_text() == "3.12\n"
    num_calls = len((project / "calls").read_text().splitlines())
    assert run(project, TORCH_INDEX="").stderr == ""
    result = run(project, VERSION="3.13", TORCH_INDEX="")
    assert ".venv is of Python 3.12; making it anew" in result.stderr
    assert (project / ".venv/bin/python.version").read_text() == "3.13\n"
    assert len((project / "calls").read_text().splitlines()) == 2 * num_calls
    (project / ".venv/bin/python").unlink()
    assert "making it anew" in run(project, TORCH_INDEX="").stderr
