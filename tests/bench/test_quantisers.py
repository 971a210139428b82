"""The comparison of quantisers: the code words, the controls, and attention to everything."""

import json
from pathlib import Path

import pytest
import torch

from bench.quantisers import SETTINGS, attention_of, capture, figures, main, uniform, vectors
from tests.backends.checkpoints import load_oracle, save_checkpoint
from tests.backends.oracle import random_prompt
from tests.paths import DEMO_MODEL, ROOT

FULL = "full_attention"
LICENCE = ROOT / "LICENSE"
NOVEL = ROOT / "commands" / "eval" / "prose" / "texts" / "novel.txt"


@pytest.mark.parametrize(("bits", "width"), [(4, 2), (2, 4)])
def test_vectors_lose_less_than_levels_and_no_less_than_any_code_can(bits: int, width: int) -> None:
    """On a normal distribution, no code of `bits` bits a value has less error than 4^-bits."""
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(5))
    of_vectors, of_levels = (
        (found - rows).square().mean() for found in (vectors(rows, width), uniform(rows, bits))
    )
    assert 4**-bits < of_vectors < of_levels < 4 * 4**-bits


def test_layers_see_what_they_see_in_transformers(tmp_path: Path) -> None:
    """The keys of the layers behind those with a sliding window."""
    folder = save_checkpoint("gemma3", tmp_path)
    token_ids = torch.tensor([random_prompt(60)])
    oracle = load_oracle(folder)
    cache = oracle(token_ids, use_cache=True).past_key_values
    kinds = oracle.config.layer_types
    expected = [layer.keys[0] for layer, kind in zip(cache.layers, kinds, strict=True) if kind == FULL]
    found = [layer.key for layer in capture(folder, [token_ids], 4)]
    assert 0 < len(found) == len(expected) < len(kinds)
    assert kinds.index(FULL) > 0
    for keys, others in zip(found, expected, strict=True):
        torch.testing.assert_close(keys, others, atol=1e-5, rtol=1e-5)


def test_a_softcap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="softcap"):
        capture(save_checkpoint("gemma2", tmp_path), [torch.tensor([random_prompt(20)])], 4)


def test_attention_to_all_tokens_in_full_precision_loses_nothing() -> None:
    layers = attention_of(str(DEMO_MODEL), [NOVEL.read_text()], 256, 1)
    assert len(layers) == 2
    exact, *_, random = SETTINGS
    assert figures(layers, exact, 128)["output_error"] < 1e-9
    assert figures(layers, exact, 8)["output_error"] > 1e-6
    assert figures(layers, exact, 8)["rows_error"] == 0
    assert figures(layers, random, 128)["share"] == pytest.approx(1)


def test_settings_are_reported_beside_controls_that_lose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    sizes = ["--length", "512", "--num-attended", "16", "--num-queries", "8"]
    assert (
        main(["--model", str(DEMO_MODEL), "--texts", str(NOVEL), str(LICENCE), *sizes, "--json", str(path)])
        == 0
    )
    assert "control: random tokens" in capsys.readouterr().out
    document = json.loads(path.read_text())
    rows = {row["setting"]: row for row in document["settings"]}
    assert (document["model"], document["num_layers"], len(rows)) == (DEMO_MODEL.name, 2, len(SETTINGS))
    exact, levels = rows["exact keys choose, exact rows"], rows["4 bits, uniform, one step"]
    assert exact["key_error"] == exact["value_error"] == 0
    assert exact["share"] == 1
    assert exact["rows_error"] == 0 < levels["rows_error"] < rows["2 bits uniform for all"]["rows_error"]
    for control in ("control: means of eight choose", "control: random tokens"):
        assert rows[control]["share"] < levels["share"]
        assert rows[control]["key_error"] == levels["key_error"]
    assert rows["2 bits uniform for all"]["key_error"] > 4 * levels["key_error"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("A few words.", (), "must have at least 4096 tokens"),
        (
            "",
            ("--length", "200", "--num-attended", "42"),
            "--num-attended must be from 1 to the 41 stored tokens",
        ),
    ],
)
def test_wrong_sizes_are_refused(
    text: str, options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text"
    path.write_text(text)
    assert main(["--model", str(DEMO_MODEL), "--texts", str(path), *options]) == 2
    assert message in capsys.readouterr().err
