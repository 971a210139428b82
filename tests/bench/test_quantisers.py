"""The comparison of quantisers: the code words, the controls, and attention to everything."""

import json
from pathlib import Path

import pytest
import torch

from bench.quantisers import SETTINGS, attention_of, figures, main, uniform, vectors
from tests.paths import DEMO_MODEL, ROOT

NOVEL = ROOT / "commands" / "eval" / "prose" / "texts" / "novel.txt"


@pytest.mark.parametrize(("bits", "width"), [(4, 2), (2, 4)])
def test_vectors_lose_less_than_levels_and_no_less_than_any_code_can(bits: int, width: int) -> None:
    """On a normal distribution, no code of so many bits has less error than 4 to the power of -bits."""
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(5))
    of_vectors, of_levels = (
        (found - rows).square().mean() for found in (vectors(rows, width), uniform(rows, bits))
    )
    assert 4**-bits < of_vectors < of_levels < 4 * 4**-bits


def test_attention_to_all_tokens_in_full_precision_loses_nothing() -> None:
    layers = attention_of(str(DEMO_MODEL), NOVEL.read_text(), 256, 8)
    assert len(layers) == 2
    exact = SETTINGS[0]
    assert figures(layers, exact, 200)["output_error"] < 1e-9
    assert figures(layers, exact, 8)["output_error"] > 1e-6


def test_settings_are_reported_beside_controls_that_lose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    sizes = ["--length", "512", "--num-attended", "16", "--num-queries", "8"]
    assert main(["--model", str(DEMO_MODEL), "--text", str(NOVEL), *sizes, "--json", str(path)]) == 0
    assert "control: random tokens" in capsys.readouterr().out
    document = json.loads(path.read_text())
    rows = {row["setting"]: row for row in document["settings"]}
    assert (document["model"], document["num_layers"], len(rows)) == (DEMO_MODEL.name, 2, len(SETTINGS))
    exact, levels = rows["exact keys choose, exact rows"], rows["4 bits, uniform (policy sparse)"]
    assert exact["key_error"] == exact["value_error"] == 0
    assert exact["share"] == 1
    for control in ("control: means of eight choose", "control: random tokens"):
        assert rows[control]["share"] < levels["share"]
        assert rows[control]["key_error"] == levels["key_error"]
    assert rows["2 bits uniform for all"]["key_error"] > 4 * levels["key_error"]


def test_a_text_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("A few words.")
    assert main(["--model", str(DEMO_MODEL), "--text", str(tmp_path / "short.txt")]) == 2
    assert "must have at least 4096 tokens" in capsys.readouterr().err
