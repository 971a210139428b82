import json
import sys
from pathlib import Path

import pytest

from bench.agreement import agreement
from bench.fidelity.comparer import SETTINGS, Comparer, settings_of, table
from bench.fidelity.presses import Kvpress
from bench.systems.system import MeasurementError
from commands.eval.compare import compare
from commands.eval.options import CaseOptions, ServedOptions
from commands.eval.ruler import RulerConfig, ruler_config
from server.options.command_line import OptionError
from server.options.models import DEMO_MODEL
from tests.bench.fidelity.test_presses import ECHO


def config(seed: int = 1, num_cases: int = 2) -> RulerConfig:
    cases = CaseOptions(tasks=("passkey",), num_cases=num_cases, length=384, seed=seed)
    return ruler_config(ServedOptions(model=str(DEMO_MODEL)), cases)


@pytest.fixture
def kvpress(tmp_path: Path) -> Kvpress:
    program = tmp_path / "worker.py"
    program.write_text(ECHO)
    return Kvpress(sys.executable, str(DEMO_MODEL), worker=(str(program),))


def test_full_caches_come_once_and_first() -> None:
    labels = [setting.label for setting in settings_of(list(SETTINGS), (4.0, 8.0))]
    assert labels[:3] == ["full", "kvpress none", "snapstream 4x"]
    assert len(labels) == len(set(labels)) == 2 + 2 * (len(SETTINGS) - 2)


@pytest.mark.long
def test_comparison_continues_a_run_and_its_runs_can_be_paired(tmp_path: Path, kvpress: Kvpress) -> None:
    Comparer(config(), kvpress, tmp_path).measure(settings_of(["kvpress none"], (4.0,)))
    absent = Kvpress("no/python", str(DEMO_MODEL))
    assert (
        Comparer(config(), absent, tmp_path).measure(settings_of(["kvpress none"], (4.0,))).runs[0].mean == 0
    )
    result = Comparer(config(), kvpress, tmp_path).measure(
        settings_of(["snapstream (guessed sizes)", "kvpress none"], (4.0,))
    )
    assert [run.setting.label for run in result.runs] == ["kvpress none", "snapstream (guessed sizes) 4x"]
    ours = json.loads((tmp_path / "comparison.json").read_text())["runs"][1]
    assert "--selection snapstream" in " ".join(ours["serve_options"])
    assert ours["packed_share"] == 1
    path = f"{tmp_path}/comparison.json"
    assert (
        compare(f"{path}#kvpress none", f"{path}#snapstream (guessed sizes) 4x").differences["mean"].first
        == 0
    )
    assert "| 4× | kvpress none | snapstream (guessed sizes) |" in table(result)


def test_new_cases_are_added_to_measured_ones(
    tmp_path: Path, kvpress: Kvpress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fails in the third of five cases and continues equals a run of all cases at once."""
    monkeypatch.setattr("bench.fidelity.comparer.CASES_PER_WRITE", 1)
    for name in ("parts", "all"):
        (tmp_path / name).mkdir()
    settings = settings_of(["kvpress none"], ())
    calls = tmp_path / "calls"
    calls.mkdir()
    fail_third_call = (
        f"import os, sys\ncount = len(os.listdir({str(calls)!r}))\n"
        f"open(f'{calls}/{{count}}', 'w')\nif count == 2: sys.exit(1)\n"
    )
    failing_worker = tmp_path / "failing.py"
    failing_worker.write_text(fail_third_call + ECHO)
    failing = Kvpress(sys.executable, str(DEMO_MODEL), worker=(str(failing_worker),))
    with pytest.raises(MeasurementError):
        Comparer(config(num_cases=4), failing, tmp_path / "parts").measure(settings)
    document = json.loads((tmp_path / "parts" / "comparison.json").read_text())
    assert len(document["runs"][0]["tasks"]["passkey"]["scores"]) == 2
    with pytest.raises(OptionError, match="has 2 cases of kvpress none: expected at most 1"):
        Comparer(config(num_cases=1), failing, tmp_path / "parts")
    parts = Comparer(config(num_cases=5), failing, tmp_path / "parts").measure(settings).runs[0]
    assert len(list(calls.iterdir())) == 3 + 3
    few = tmp_path / "parts" / "few.json"  # of several runs of a setting, the longest counts
    few.write_text((tmp_path / "parts" / "comparison.json").read_text())
    Comparer(config(num_cases=6), failing, tmp_path / "parts").measure(settings)
    earlier = [tmp_path / "parts" / "comparison.json", few]
    merged = Comparer(config(num_cases=6), None, tmp_path / "all", earlier).measure(settings)
    assert merged.runs[0].num_cases == 6
    (tmp_path / "all" / "comparison.json").unlink()
    monkeypatch.setattr("bench.fidelity.comparer.CASES_PER_WRITE", 5)
    assert parts == Comparer(config(num_cases=5), kvpress, tmp_path / "all").measure(settings).runs[0]


def test_run_with_other_options_or_tasks_is_not_continued(tmp_path: Path, kvpress: Kvpress) -> None:
    settings = settings_of(["kvpress none"], ())
    path = tmp_path / "comparison.json"
    Comparer(config(), kvpress, tmp_path).measure(settings)
    document = json.loads(path.read_text())
    document["runs"][0]["serve_options"][-1] = "kvpress 1"
    path.write_text(json.dumps(document))
    with pytest.raises(
        OptionError, match="results of kvpress none with 'None kvpress 1', not 'None kvpress 0'"
    ):
        Comparer(config(num_cases=3), kvpress, tmp_path).measure(settings)
    document["runs"][0]["tasks"]["vt"] = document["runs"][0]["tasks"].pop("passkey")
    path.write_text(json.dumps(document))
    with pytest.raises(OptionError, match="has runs of other tasks: expected passkey, got vt"):
        Comparer(config(), kvpress, tmp_path)


def test_runs_of_another_seed_raise(tmp_path: Path, kvpress: Kvpress) -> None:
    Comparer(config(), kvpress, tmp_path).measure(settings_of(["kvpress none"], (4.0,)))
    with pytest.raises(OptionError, match="another seed: expected 2, got 1"):
        Comparer(config(seed=2), kvpress, tmp_path)


def test_runs_of_several_calls_are_merged(tmp_path: Path, kvpress: Kvpress) -> None:
    folders = [tmp_path / name for name in ("first", "second", "both")]
    for folder in folders:
        folder.mkdir()
    Comparer(config(), kvpress, folders[0]).measure(settings_of(["kvpress SnapKV"], (4.0,)))
    Comparer(config(), kvpress, folders[1]).measure(settings_of(["kvpress none"], (4.0,)))
    earlier = [folder / "comparison.json" for folder in folders[:2]]
    Comparer(config(), None, folders[2], earlier).measure(
        settings_of(["kvpress none", "kvpress SnapKV"], (4.0,))
    )
    written = json.loads((folders[2] / "comparison.json").read_text())["runs"]
    assert [run["label"] for run in written] == ["kvpress SnapKV 4x", "kvpress none"]
    with pytest.raises(OptionError, match=r"first/gone\.json cannot be read"):
        Comparer(config(), None, folders[2], [folders[0] / "gone.json"])


def test_kvpress_setting_needs_kvpress_python(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'kvpress ChunkKV', which needs --kvpress-python"):
        Comparer(config(), None, tmp_path).measure(settings_of(["kvpress ChunkKV"], (4.0,)))


def test_agreement_separates_differences_due_to_borders() -> None:
    # At the borders, two and one of the five averaged scores are zeros beyond the border.
    theirs = [0.3, 0.9, 0.1, 0.1, 0.8, 0.1, 0.1, 0.1, 0.1, 0.41]
    kept = [[1, 4, 9, 10, 11]]  # 10 and 11 are the window
    # Averages within the borders are 0.5, 1.125, …, 0.41 · 5 / 3 = 0.68.
    same = agreement([([[[0, 1, 4]]], [kept], [[theirs]])])
    assert (same.num_choices, same.num_kept) == (1, 3)
    assert (same.num_common, same.num_common_at_equal_borders) == (2, 2)
    other = agreement([([[[1, 4, 9]]], [kept], [[theirs]])])
    assert (other.num_common, other.num_common_at_equal_borders, other.largest_gap) == (3, 3, 0)
    assert same.largest_gap == pytest.approx((0.41 - 0.3) / 0.41)
