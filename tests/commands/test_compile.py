"""`snapserve compile`: what it leaves in the cache, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends.torch_backend.compiled.build import code_folder
from backends.torch_backend.native.kernels import kernels_are_supported
from commands.cli import main
from tests.backends.checkpoints import save_checkpoint
from tests.backends.kernels import copy_kernels
from tests.paths import DEMO_MODEL


def test_only_torch_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--backend", "fake"]) == 2
    assert "only --backend torch compiles" in capsys.readouterr().err
    assert main(["compile", "--no-compile"]) == 2
    assert "--require-compiled needs compile" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")
def test_a_second_call_finds_what_the_first_one_compiled(tmp_path: Path, built_kernels: Path) -> None:
    model = save_checkpoint("llama", tmp_path, num_hidden_layers=1)  # each takes long to compile
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((DEMO_MODEL / name).read_bytes())
    cache = tmp_path / "cache"
    copy_kernels(built_kernels, code_folder(cache))  # they take the longest
    command = [sys.executable, "-m", "server", "compile", "--model", str(model), "--max-model-len", "128"]
    files: list[list[Path]] = []
    for compiler in ("g++", "no-such-compiler", "g++"):
        done = subprocess.run(
            [*command, "--num-slots", "2", "--compile-cache", str(cache)],
            env=os.environ | {"CXX": compiler},
            capture_output=True,
            text=True,
            timeout=300,
        )
        output = done.stdout + done.stderr
        files.append(sorted(cache.rglob("*.graph")))
        if compiler == "g++":
            assert done.returncode == 0, output
            assert f"compiled into {cache}" in output
        else:
            assert done.returncode == 1, output
            assert "--require-compiled: decode is not compiled" in output
    assert files[0]
    assert files[0] == files[1] == files[2]
    assert "compiled in 0.0 s" in output
