"""Tests of the start benchmark: times read from the log, fresh servers, and the table of ratios."""

from pathlib import Path

import pytest

from backends.torch_backend.compiled.code import COMPILED_MESSAGE
from bench.start import COMPILING, ON_DISK, UNCOMPILED, FreshServer, table, wait_for_code
from bench.systems.system import HttpServer, MeasurementError
from commands.loadtest.config import Address, Load
from server.options.models import DEMO_MODEL

UNREACHABLE = HttpServer(Address("http://127.0.0.1:9"), 1.0)


def test_times_are_read_from_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("INFO " + COMPILED_MESSAGE % (1.23, 20.5, 0.336) + "\nINFO ready")
    assert wait_for_code(UNREACHABLE, tmp_path / "log", float("inf")) == {
        "trace": 1.2,
        "compile": 20.5,
        "load": 0.34,
    }


def test_server_without_compiler_raises_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("WARNING no compiler")
    with pytest.raises(MeasurementError, match="no compiler"):
        wait_for_code(UNREACHABLE, tmp_path / "log", 0.0)


def test_fresh_server_is_started_and_loaded() -> None:
    load = Load(num_prompts=2, input_len=8, output_len=4, max_concurrency=2, ignore_eos=True)
    figures = FreshServer(DEMO_MODEL).measure(load)
    assert (figures["completed"], figures["total_output_tokens"]) == (2, 8)
    assert figures["seconds_to_ready"] is not None


def test_table_compares_compiling_with_not_compiling() -> None:
    base = {"seconds_to_ready": 5.0, "output_throughput": 100.0, "median_tpot_ms": 20.0}
    slower = base | {"output_throughput": 80.0, "median_tpot_ms": 24.0}
    text = table({UNCOMPILED: [base], COMPILING: [slower | {"seconds_to_compiled": 40.0}], ON_DISK: [base]})
    assert "| nothing on disk | 5 | 40 |  |  |  | 80 | 24 |  |" in text
    assert "output tokens/s **0.80**, TPOT (ms) **1.20**" in text
