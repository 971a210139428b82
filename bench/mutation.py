"""Mutation testing: whether the tests notice small changes of the code.

A mutant is a clone of the last commit in which one operator, Boolean result or call differs. The tests run in
the given order until one fails, which kills the mutant. A survivor is either equivalent or shows what no test
checks. `docs/reports/mutation.md` has results.

Usage: `python -m bench.mutation --code server/generation --tests tests/server/generation tests/conformance
[--num-mutants 20] [--seed 1] [--json FILE]`.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIME_LIMIT = 600.0  # seconds that the tests of one mutant may take; one that never ends is killed
OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a module: the line and the expression before and after, and the module's new source."""

    line: int
    was: str
    now: str
    source: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a mutant. `killed_by` is the test that failed, or None if all passed."""

    file: str
    line: int
    was: str
    now: str
    killed_by: str | None
    seconds: float


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module. Assertions and calls of a logger are left as they are."""
    tree = ast.parse(source)
    asserted = {part for node in ast.walk(tree) if isinstance(node, ast.Assert) for part in ast.walk(node)}
    for node in ast.walk(tree):
        change = None if node in asserted else _change(node)
        if change is None:
            continue
        field, value = change
        was, old = ast.unparse(node), getattr(node, field)
        setattr(node, field, value)
        yield Mutant(getattr(node, "lineno", 0), was, ast.unparse(node), ast.unparse(tree))
        setattr(node, field, old)


def _change(node: ast.AST) -> tuple[str, object] | None:
    """Return the field of a node that a mutant changes, and its new value."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in OPPOSITES:
            return "ops", [OPPOSITES[type(operator)]()]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OPPOSITES:
            return "op", OPPOSITES[type(operator)]()
        case ast.Return(value=ast.Constant(value=bool() as result)):
            return "value", ast.Constant(not result)
        case ast.Expr(value=ast.Call(func=function)) if "logger" not in ast.unparse(function):
            return "value", ast.Constant(None)
        case _:
            return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Test mutants and print a line for each. Returns 1 if the tests fail without a change."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
        if (failure := first_failure(copy, options.tests)) is not None:
            print(f"without a change, the tests fail: {failure}", file=sys.stderr)
            return 1
        files = [file for code in options.code for file in _modules(copy / code)]
        pool = [(file, mutant) for file in files for mutant in mutants(file.read_text())]
        chosen = random.Random(options.seed).sample(pool, min(options.num_mutants, len(pool)))
        verdicts = []
        for file, mutant in chosen:
            verdicts.append(_test(copy, file, mutant, options.tests))
            print(json.dumps(asdict(verdicts[-1])), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    num_killed = sum(verdict.killed_by is not None for verdict in verdicts)
    print(f"{num_killed} of {len(verdicts)} mutants were killed; the code has {len(pool)}.", file=sys.stderr)
    return 0


def first_failure(copy: Path, tests: Sequence[str]) -> str | None:
    """Return the first test that fails in a copy of the repository, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    command += ["--hypothesis-seed=1", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TIME_LIMIT:.0f} s"
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR tests"))]
    return failed[0].split(" - ")[0] if failed else done.stdout[-300:]


def _test(copy: Path, file: Path, mutant: Mutant, tests: Sequence[str]) -> Verdict:
    source = file.read_text()
    start = time.monotonic()
    file.write_text(mutant.source)
    try:
        killed_by = first_failure(copy, tests)
    finally:
        file.write_text(source)
    seconds = round(time.monotonic() - start, 1)
    return Verdict(str(file.relative_to(copy)), mutant.line, mutant.was, mutant.now, killed_by, seconds)


def _modules(code: Path) -> list[Path]:
    return sorted(code.rglob("*.py")) if code.is_dir() else [code]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.mutation", description=__doc__)
    parser.add_argument("--code", nargs="+", required=True, help="modules or folders to change")
    parser.add_argument("--tests", nargs="+", required=True, help="tests, the quickest to kill first")
    parser.add_argument("--num-mutants", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the verdicts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
