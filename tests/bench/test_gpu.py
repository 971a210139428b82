"""The measurements of a GPU run on a CPU with a small model, and the result says so."""

import json
from pathlib import Path

import pytest

from bench.floor import work_of
from bench.gpu import llama_8b, main
from tests.backends.checkpoints import save_checkpoint

SMALL = [
    *("--device", "cpu", "--dtype", "float32", "--batch", "1", "3", "--entries", "64", "--context", "512"),
    *("--full-slots", "1", "--num-steps", "2", "--rounds", "1", "--prefill-chunk", "128"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint("llama", tmp_path_factory.mktemp("checkpoint")))


def test_every_figure_is_reported_and_drawn(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--json", str(tmp_path / "gpu.json"), "--plot", str(tmp_path / "gpu.svg"))
    assert main([*SMALL, "--model", model, *files]) == 0
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["figures_owed"] is True
    assert [(row["batch"], row["way"]) for row in document["decode"]] == [(1, "eager"), (3, "eager")]
    assert all(row["tokens_per_second"] > 0 < row["bandwidth_share"] for row in document["decode"])
    memory = document["same_memory"]
    assert [memory[name]["sequences"] for name in ("full", "snapstream")] == [1, 4]
    # Small slots also hold spare entries and the kept indices.
    assert memory["snapstream"]["cache_bytes"] == pytest.approx(memory["full"]["cache_bytes"], rel=0.1)
    assert memory["ratio"] > 0
    assert document["prefill"]["tokens"] == 511
    assert document["prefill"]["scoring_share"] > 0  # of two times: beside other work it may be above 1
    assert (tmp_path / "gpu.svg").read_text().startswith("<?xml")
    printed = capsys.readouterr()
    assert "figures are missing" in printed.out
    assert "prefill of 511 tokens" in printed.err


def test_missing_memory_is_reported(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 64 entries of 512 bytes, one sequence and a scratch fit in memory, and three do not."""
    options = [
        "--max-cache-gb",
        "0.0001",
        "--json",
        str(tmp_path / "gpu.json"),
        "--plot",
        str(tmp_path / "gpu.png"),
    ]
    assert main([*SMALL, "--model", model, *options]) == 0
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["batch"]: "seconds" in row for row in document["decode"]} == {1: True, 3: False}
    assert document["same_memory"]["bytes_missing"] > 0
    assert document["prefill"] is None
    assert capsys.readouterr().out.count("of memory missing") == 2


def test_default_model_has_eight_billion_weights() -> None:
    work = work_of(llama_8b(), 2)
    # The embedding is as large as the output layer.
    assert work.weight_bytes + 2 * work.num_output == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert work.entry_bytes == 128 * 1024
