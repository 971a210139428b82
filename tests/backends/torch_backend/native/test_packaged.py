"""The kernels that come with the package: which library is used, and that each instruction set computes."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from backends.torch_backend.native import packaged
from backends.torch_backend.native.kernels import (
    INSTRUCTION_SETS,
    build_kernels,
    instruction_set,
)
from backends.torch_backend.native.packaged import build_all, packaged_kernels
from tests.paths import ROOT

QUANTIZED = ("quantized_linear", "grouped_linear", "experts")  # whose products are kernels of their own


def processor_with(*names: str) -> Mapping[str, bool]:
    return dict.fromkeys(names, True)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("avx2", "fma3", "avx512_vnni", "avx512_bf16", "amx_bf16"), "amx_bf16"),
        (("avx2", "avx512_f", "avx512_vnni", "avx512_bf16"), "avx512_bf16"),
        (("avx2", "avx512_f", "avx512_vnni"), "avx512_vnni"),
        ((*INSTRUCTION_SETS["avx2"].needs, "avx512_f"), "avx2"),
        (("avx2",), None),
    ],
)
def test_the_best_library_of_the_processor_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], expected: str | None
) -> None:
    monkeypatch.setattr(packaged, "build_kernels", lambda path, _name: path.touch())
    libraries = build_all(tmp_path)
    assert set(libraries) == set(INSTRUCTION_SETS)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor_with(*names))
    assert instruction_set() == expected
    assert packaged_kernels(tmp_path) == (None if expected is None else libraries[expected])
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert packaged_kernels(tmp_path) is None, "a library fits only the torch that it was built with"


@pytest.mark.long
def test_kernels_of_lesser_instruction_sets_pass_the_same_tests(tmp_path: Path) -> None:
    """Those that the processor has beside its best one, which all other tests use."""
    has = torch.cpu.get_capabilities()
    for name in ("avx512_vnni", "avx2"):
        if name == instruction_set() or not all(map(has.get, INSTRUCTION_SETS[name].needs)):
            continue
        library = tmp_path / f"{name}.so"
        build_kernels(library, name)
        native = Path(__file__).parent
        tests = [native / f"test_{part}.py" for part in ("draws", "kernels", "sparse_attention", "states")]
        tests += [native.parent / "model" / f"test_{part}.py" for part in QUANTIZED]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, tests)],
            cwd=ROOT,
            env=os.environ | {"TESTED_KERNELS": str(library)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        assert "passed" in done.stdout
