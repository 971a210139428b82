import json
import sys
from pathlib import Path

import pytest

from bench.agreement import agreement
from bench.comparison import SETTINGS, Comparer, settings_of, table
from bench.presses import Kvpress
from bench.systems import MeasurementError
from commands.eval.compare import compare
from commands.eval.options import CaseOptions, ServedOptions
from commands.eval.ruler import RulerConfig, ruler_config
from server.options.command_line import OptionError
from server.options.serve import DEMO_MODEL
from tests.bench.test_presses import ECHO


def config(seed: int = 1, num_cases: int = 2) -> RulerConfig:
    cases = CaseOptions(tasks=("passkey",), num_cases=num_cases, length=384, seed=seed)
    return ruler_config(ServedOptions(model=str(DEMO_MODEL)), cases)


@pytest.fixture
def kvpress(tmp_path: Path) -> Kvpress:
    program = tmp_path / "side.py"
    program.write_text(ECHO)
    return Kvpress(sys.executable, str(DEMO_MODEL), worker=(str(program),))


def test_whole_caches_come_once_and_first() -> None:
    labels = [setting.label for setting in settings_of(list(SETTINGS), (4.0, 8.0))]
    assert labels[:3] == ["full", "kvpress none", "snapstream 4x"]
    assert len(labels) == len(set(labels)) == 2 + 2 * (len(SETTINGS) - 2)


def test_a_comparison_goes_on_where_it_was_left_and_its_runs_can_be_paired(
    tmp_path: Path, kvpress: Kvpress
) -> None:
    Comparer(config(), kvpress, tmp_path).measure(settings_of(["kvpress none"], (4.0,)))
    gone = Kvpress("no/python", str(DEMO_MODEL))
    assert Comparer(config(), gone, tmp_path).measure(settings_of(["kvpress none"], (4.0,))).runs[0].mean == 0
    result = Comparer(config(), kvpress, tmp_path).measure(
        settings_of(["snapstream (paper)", "kvpress none"], (4.0,))
    )
    assert [run.setting.label for run in result.runs] == ["kvpress none", "snapstream (paper) 4x"]
    ours = json.loads((tmp_path / "comparison.json").read_text())["runs"][1]
    assert "--query-reduction sum" in " ".join(ours["serve_options"])
    assert ours["packed_share"] == 1
    place = f"{tmp_path}/comparison.json"
    assert compare(f"{place}#kvpress none", f"{place}#snapstream (paper) 4x").differences["mean"].first == 0
    assert "| 4× | kvpress none | snapstream (paper) |" in table(result)


def test_cases_are_added_to_those_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the third case of five, gone on with and added to, the run is the same as one of all cases at once."""
    monkeypatch.setattr("bench.comparison.CASES_AT_ONCE", 1)
    for name in ("parts", "whole"):
        (tmp_path / name).mkdir()
    settings, calls = settings_of(["kvpress none"], ()), tmp_path / "calls"
    breaks = f"import os, sys\nnumber = len(os.listdir({str(calls)!r}))\nopen(f'{calls}/{{number}}', 'w')\nif number == 2: sys.exit(1)\n"
    sides = {}
    for name, source in (("breaks", breaks + ECHO), ("whole", ECHO)):
        sides[name] = tmp_path / f"{name}.py"
        sides[name].write_text(source)
    calls.mkdir()
    breaking, echo = (
        Kvpress(sys.executable, str(DEMO_MODEL), worker=(str(sides[name]),)) for name in ("breaks", "whole")
    )
    with pytest.raises(MeasurementError):
        Comparer(config(num_cases=4), breaking, tmp_path / "parts").measure(settings)
    assert (
        len(
            json.loads((tmp_path / "parts" / "comparison.json").read_text())["runs"][0]["tasks"]["passkey"][
                "scores"
            ]
        )
        == 2
    )
    with pytest.raises(OptionError, match="has 2 cases of kvpress none, more than the 1 asked for"):
        Comparer(config(num_cases=1), breaking, tmp_path / "parts")
    parts = Comparer(config(num_cases=5), breaking, tmp_path / "parts").measure(settings).runs[0]
    assert len(list(calls.iterdir())) == 3 + 3
    few = tmp_path / "parts" / "few.json"  # the most of a setting counts, wherever it is
    few.write_text((tmp_path / "parts" / "comparison.json").read_text())
    Comparer(config(num_cases=6), breaking, tmp_path / "parts").measure(settings)
    earlier = [tmp_path / "parts" / "comparison.json", few]
    assert (
        Comparer(config(num_cases=6), None, tmp_path / "whole", earlier).measure(settings).runs[0].num_cases
        == 6
    )
    (tmp_path / "whole" / "comparison.json").unlink()
    monkeypatch.setattr("bench.comparison.CASES_AT_ONCE", 5)
    assert parts == Comparer(config(num_cases=5), echo, tmp_path / "whole").measure(settings).runs[0]


def test_what_was_measured_otherwise_is_not_gone_on_with(tmp_path: Path, kvpress: Kvpress) -> None:
    settings, place = settings_of(["kvpress none"], ()), tmp_path / "comparison.json"
    Comparer(config(), kvpress, tmp_path).measure(settings)
    document = json.loads(place.read_text())
    document["runs"][0]["serve_options"][-1] = "kvpress 1"
    place.write_text(json.dumps(document))
    with pytest.raises(
        OptionError, match="kvpress none has been measured with 'None kvpress 1' and not 'None kvpress 0'"
    ):
        Comparer(config(num_cases=3), kvpress, tmp_path).measure(settings)
    document["runs"][0]["tasks"]["vt"] = document["runs"][0]["tasks"].pop("passkey")
    place.write_text(json.dumps(document))
    with pytest.raises(OptionError, match="has runs of other tasks: vt and not passkey"):
        Comparer(config(), kvpress, tmp_path)


def test_runs_of_other_cases_are_not_taken_for_these(tmp_path: Path, kvpress: Kvpress) -> None:
    Comparer(config(), kvpress, tmp_path).measure(settings_of(["kvpress none"], (4.0,)))
    with pytest.raises(OptionError, match="another seed: 1 and not 2"):
        Comparer(config(seed=2), kvpress, tmp_path)


def test_runs_of_several_calls_are_put_together(tmp_path: Path, kvpress: Kvpress) -> None:
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


def test_kvpress_must_be_named_where_it_is_asked(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="kvpress ChunkKV needs --kvpress-python"):
        Comparer(config(), None, tmp_path).measure(settings_of(["kvpress ChunkKV"], (4.0,)))


def test_agreement_tells_what_borders_explain_from_what_is_left() -> None:
    theirs = [
        0.3,
        0.9,
        0.1,
        0.1,
        0.8,
        0.1,
        0.1,
        0.1,
        0.1,
        0.41,
    ]  # a zero beyond the border in two of five, and in one
    kept = [[1, 4, 9, 10, 11]]  # 10 and 11 are the window
    same = agreement(
        [([[[0, 1, 4]]], [kept], [[theirs]])]
    )  # averaged within the borders: 0.5, 1.125, …, 0.41 · 5 / 3 = 0.68
    assert (same.num_choices, same.num_kept, same.num_common, same.num_common_at_equal_borders) == (
        1,
        3,
        2,
        2,
    )
    other = agreement([([[[1, 4, 9]]], [kept], [[theirs]])])
    assert (other.num_common, other.num_common_at_equal_borders, other.largest_gap) == (3, 3, 0)
    assert same.largest_gap == pytest.approx((0.41 - 0.3) / 0.41)
