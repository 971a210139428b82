"""torch's private interfaces: who uses them, when they are imported, and how a backend runs without them."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backends.torch_backend.native.kernels import kernels_are_supported
from backends.torch_backend.torch_private import missing_interfaces, onednn
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import Driver, Request, open_backend
from tests.backends.oracle import random_prompt

ROOT = Path(__file__).parents[3]
FENCE = ROOT / "backends" / "torch_backend" / "torch_private"
PACKAGES = ("backends", "bench", "cache", "commands", "examples", "scheduler", "server")
POLICY = PolicyOptions(PolicyName.FULL)
MAX_MODEL_LEN = 64
NUM_TOKENS = 6

# All that `torch_private.inductor` imports but the modules that torch needs itself to load a model.
COMPILER = (
    "torch._inductor.compile_fx",
    "torch._inductor.pattern_matcher",
    "torch._inductor.standalone_compile",
    "torch._dynamo.source",
    "torch.fx.experimental.proxy_tensor",
)

OPERATORS = ("torch.ops.mkldnn",)

# Removes oneDNN's operators or the named modules, starts a backend, lets it compile, and prints its answer.
START = """
import json, logging, sys, types
from pathlib import Path
import torch
import backends.torch_backend.backend
from tests.backends.driver import Driver, Request, open_backend
from tests.backends.torch_backend.test_torch_private import MAX_MODEL_LEN, NUM_TOKENS, POLICY

checkpoint, prompt, compile_cache, removed = json.loads(sys.argv[1])
if "torch.ops.mkldnn" in removed:
    torch.ops.mkldnn = types.SimpleNamespace()
else:
    sys.modules.update(dict.fromkeys(removed))
logging.basicConfig(format="%(message)s")
folder = None if compile_cache is None else Path(compile_cache)
backend = open_backend(Path(checkpoint), POLICY, MAX_MODEL_LEN, compile_cache=folder)
request = Request(prompt)
if folder is None:  # otherwise it is warm
    backend.warmup()
Driver(backend, 32).run(request, num_tokens=NUM_TOKENS)
is_compiled = backend.compiled is not None and any(step.are_used for step in backend.compiled.steps)
print(json.dumps([request.tokens, is_compiled, list(sys.modules)]))
"""


@dataclass(frozen=True)
class Start:
    """What a backend in a process of its own did."""

    tokens: list[int]
    is_compiled: bool
    modules: set[str]
    log: str


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))


def _start(checkpoint: Path, compile_cache: Path | None = None, removed: tuple[str, ...] = ()) -> Start:
    arguments = [str(checkpoint), random_prompt(20), str(compile_cache) if compile_cache else None, removed]
    command = [sys.executable, "-c", START, json.dumps(arguments)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    tokens, is_compiled, modules = json.loads(process.stdout)
    return Start(tokens, is_compiled, set(modules), process.stderr)


def _imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _used_names(path: Path) -> Iterator[str]:
    """Yield everything that a file imports or reaches by a chain of attributes, with dots."""
    yield from _imported_modules(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def _is_private(name: str) -> bool:
    first, *parts = name.split("(")[0].split(".")
    has_underscore = any(part.startswith("_") and not part.startswith("__") for part in parts)
    is_internal = parts[:2] in (["fx", "experimental"], ["ops", "mkldnn"])
    return first == "torch" and (has_underscore or is_internal)


def test_only_the_fence_uses_private_interfaces_of_torch() -> None:
    users = {
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(_is_private(name) for name in _used_names(path))
    }
    assert users == {FENCE / name for name in ("dynamo.py", "inductor.py", "onednn.py")}


def test_a_backend_that_compiles_nothing_imports_no_compiler(checkpoint: Path) -> None:
    start = _start(checkpoint)
    assert "backends.torch_backend.backend" in start.modules
    assert "torch._inductor.compile_fx" not in start.modules
    assert "backends.torch_backend.compiled.fusion" not in start.modules


@pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")
@pytest.mark.parametrize(
    ("removed", "named"),
    [(OPERATORS, "torch.ops.mkldnn._reorder_linear_weight"), (COMPILER, "torch._dynamo.source")],
)
def test_without_private_interfaces_a_backend_runs_uncompiled(
    checkpoint: Path, tmp_path: Path, removed: tuple[str, ...], named: str
) -> None:
    expected = Request(random_prompt(20))
    Driver(open_backend(checkpoint, POLICY, MAX_MODEL_LEN), 32).run(expected, num_tokens=NUM_TOKENS)
    start = _start(checkpoint, tmp_path, removed)
    assert start.tokens == expected.tokens
    assert not start.is_compiled
    warnings = [line for line in start.log.splitlines() if "private interfaces" in line]
    assert len(warnings) == 1
    assert torch.__version__ in warnings[0]
    assert named in warnings[0]


def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_interfaces(for_compiling=True) == []
    monkeypatch.delitem(sys.modules, "backends.torch_backend.torch_private.inductor")
    monkeypatch.delattr("backends.torch_backend.torch_private.inductor")
    monkeypatch.setitem(sys.modules, "torch._inductor.pattern_matcher", None)
    assert missing_interfaces(for_compiling=False) == []
    [message] = missing_interfaces(for_compiling=True)
    assert "torch._inductor.pattern_matcher" in message


def test_missing_operators_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert onednn.supports(torch.float32)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(_linear_pointwise=None))
    missing = missing_interfaces(for_compiling=False)
    assert "torch.ops.mkldnn._reorder_linear_weight" in missing
    assert "torch.ops.mkldnn._linear_pointwise" not in missing
    assert not onednn.supports(torch.float32)
