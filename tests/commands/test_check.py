"""`snapserve check`: what it says of models that are served and of others."""

import json
from pathlib import Path

import pytest

from commands.cli import main
from tests.backends.checkpoints import save_checkpoint
from tests.gguf_files import write_gguf


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["check", *arguments])
    output, errors = capsys.readouterr()
    return status, output + errors


def configuration(folder: Path, **changes: object) -> str:
    """Write a configuration without weights; return its folder."""
    members = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 320,
        "max_position_embeddings": 5000,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(members | changes))
    return str(folder)


def test_slots_take_what_their_keys_and_values_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = configuration(tmp_path, num_hidden_layers=64, num_key_value_heads=4)
    status, output = check(capsys, model, "--num-slots", "4")
    assert status == 0
    assert "llama, 64 layers" in output
    assert "up to 5000 tokens; here 5000" in output
    rows = {tuple(cells[:2]): cells[2:] for cells in map(str.split, output.splitlines()) if len(cells) == 10}
    # 5,000 entries and a spare one, of 64 layers and 4 heads, keys and values, 16 numbers of 2 bytes each.
    num_bytes = 5001 * 64 * 4 * 2 * 16 * 2
    assert rows["full", "5000"][0] == f"{num_bytes / 1e9:.3f}"
    assert rows["full", "5000"][2] == f"{4 * num_bytes / 1e9:.3f}"
    assert {entries for _, entries in rows} == {"1024", "2048", "4096", "5000"}


def test_the_length_is_the_one_that_the_server_would_choose(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.torch_backend.memory.free_bytes", lambda _device: 10**11)
    model = configuration(tmp_path, max_position_embeddings=20_000)
    assert "up to 20000 tokens; here 20000" in check(capsys, model)[1]


@pytest.mark.parametrize("architecture", ["gemma3", "deepseek-v3", "lfm2", "gpt2"])
def test_families_are_probed_without_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, architecture: str
) -> None:
    folder = save_checkpoint(architecture, tmp_path)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    status, output = check(capsys, str(folder))
    assert (status, "full" in output) == (0, True)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_gguf_file_is_read_up_to_its_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, is_folder: bool
) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    status, output = check(capsys, str(tmp_path if is_folder else file))
    assert (status, "llama, 2 layers" in output, "in bfloat16" in output) == (0, True, True)
    file.write_bytes(b"GGUF" + bytes(40))
    status, output = check(capsys, str(file))
    assert (status, "not served" in output) == (1, True)


def test_a_refused_model_has_a_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    quantised = configuration(tmp_path, quantization_config={"quant_method": "hqq"})
    status, output = check(capsys, quantised)
    assert (status, "not served" in output, "hqq" in output) == (1, True, True)
    (tmp_path / "config.json").write_text("{}")
    status, output = check(capsys, str(tmp_path))
    assert (status, "no configuration" in output) == (1, True)


def test_wrong_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert check(capsys, "/nowhere")[0] == 2
    assert "download" in check(capsys, "owner/name/file.gguf")[1]
    status, output = check(capsys, configuration(tmp_path), "--max-model-len", "9999")
    assert (status, "--max-model-len must be at most the model's 5000" in output) == (2, True)
