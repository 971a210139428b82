"""The comparison over layouts: one file for each, and a summary of all."""

import json
import sys
from pathlib import Path

import pytest

from bench.fidelity.presses import Kvpress
from bench.real_models import LAYOUTS, Comparison, default_settings, main
from commands.eval.options import ProseOptions, ProseSuiteOptions, ReportOptions, ServedOptions
from server.options.models import DEMO_MODEL
from tests.bench.fidelity.test_presses import ECHO


def comparison(out: Path, settings: list[str], layouts: list[str]) -> Comparison:
    worker = out / "worker.py"
    worker.write_text(ECHO)
    kvpress = Kvpress(sys.executable, str(DEMO_MODEL), worker=(str(worker),))
    cases = ProseOptions(tasks=("code",), num_cases=1, length=700, chat_template=False)
    options = ProseSuiteOptions(ServedOptions(model=str(DEMO_MODEL)), cases, ReportOptions())
    return Comparison(out, kvpress, settings, layouts, options)


def test_each_layout_has_its_cases_and_the_summary_has_all_settings(tmp_path: Path) -> None:
    comparison(tmp_path, ["kvpress none"], ["last", "first"]).measure()
    comparison(tmp_path, ["kvpress SnapKV"], ["first", "last", "200-after"]).measure()
    documents = {
        layout: json.loads((tmp_path / layout / "comparison.json").read_text())
        for layout in ("last", "first", "200-after")
    }
    assert [len(document["runs"]) for document in documents.values()] == [2, 2, 1]
    assert documents["first"]["question_position"] == "first"
    assert documents["200-after"]["trailing_tokens"] == 200
    summary = (tmp_path / "summary.md").read_text()
    assert "| mean over tasks, % | first | last | 200-after |" in summary
    assert "| kvpress none | 0 (0 to 79) | 0 (0 to 79) | – |" in summary
    assert "## 200-after" in summary


def test_every_layout_writes_cases(tmp_path: Path) -> None:
    for layout in LAYOUTS.keys() - {"turns"}:  # it needs a chat template, which the model lacks
        assert comparison(tmp_path, [], [layout]).config(layout).cases.length == 700


def test_kvzip_is_left_out_where_layers_have_windows(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    configs = [
        ({"layer_types": ["full_attention", "full_attention"], "sliding_window": 512}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"sliding_window": 4096}, False),
        ({"sliding_window": None}, True),
        ({}, True),
    ]
    for config, has_kvzip in configs:
        (folder / "config.json").write_text(json.dumps(config))
        assert ("kvpress KVzip" in default_settings(folder)) == has_kvzip, config


@pytest.mark.long
def test_results_of_other_selection_code_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = comparison(tmp_path, ["kvpress none", "snapstream"], ["last"]).measure()["last"]
    monkeypatch.setattr("bench.fidelity.comparer.selection_digest", lambda: "other")
    again = comparison(tmp_path, ["kvpress none"], ["last"]).measure()["last"]
    assert [run.setting.label for run in first.runs] == ["snapstream 4x", "kvpress none"]
    assert [run.setting.label for run in again.runs] == ["kvpress none"]
    assert "snapstream 4x came from other code" in capsys.readouterr().err


def test_a_damaged_model_ends_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "damaged.gguf"
    file.write_bytes(b"GGUF, and then nothing")
    monkeypatch.setattr(sys, "argv", ["bench.real_models", "--model", str(file), "--out", str(tmp_path)])
    assert main() == 1
    assert "cannot be read as GGUF" in capsys.readouterr().err
