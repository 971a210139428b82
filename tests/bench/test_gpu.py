"""What is measured on a GPU runs here with a small model, and says that it is no GPU's."""

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


def test_every_figure_is_told_and_drawn(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                *SMALL,
                "--model",
                model,
                "--json",
                str(tmp_path / "gpu.json"),
                "--plot",
                str(tmp_path / "gpu.svg"),
            ]
        )
        == 0
    )
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["figures_owed"] is True
    assert [(row["batch"], row["way"]) for row in document["decode"]] == [(1, "eager"), (3, "eager")]
    assert all(row["tokens_per_second"] > 0 < row["bandwidth_share"] for row in document["decode"])
    memory = document["same_memory"]
    assert [memory[name]["sequences"] for name in ("full", "snapstream")] == [1, 4]
    assert memory["snapstream"]["cache_bytes"] == pytest.approx(
        memory["full"]["cache_bytes"], rel=0.1
    )  # spare entries, kept indices
    assert memory["ratio"] > 0
    assert document["prefill"]["tokens"] == 511
    assert 0 < document["prefill"]["scoring_share"] < 1
    assert (tmp_path / "gpu.svg").read_text().startswith("<?xml")
    told = capsys.readouterr()
    assert "figures are owed" in told.out
    assert "prefill of 511 tokens" in told.err


def test_what_has_no_room_is_named(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64 entries of the model's 768 bytes: there is room for one sequence and a scratch, and not for three."""
    options = [
        "--max-cache-gb",
        "0.00015",
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
    assert capsys.readouterr().out.count("too little memory") == 2


def test_the_default_model_is_one_of_eight_billion() -> None:
    work = work_of(llama_8b(), 2)
    assert work.weight_bytes + 2 * work.num_output == pytest.approx(
        2 * 8.03e9, rel=1e-3
    )  # the embedding is as large as the output layer
    assert work.entry_bytes == 128 * 1024
