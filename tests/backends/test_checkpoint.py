"""GGUF files as models: what is converted, what it computes, and what is refused."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.quantization_config import GgufConfig

from backends import conversion
from backends.checkpoint import CACHE, model_id
from backends.conversion import local_model
from backends.errors import ModelLoadError
from backends.torch_backend.config import Quantization
from backends.torch_backend.errors import UnsupportedModelError
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from server.options.models import smollm2_file
from server.text.tokenizer import Tokenizer
from tests.backends.driver import Driver, Request, open_backend
from tests.backends.oracle import continue_greedily
from tests.gguf_files import TEMPLATE, Content, write_gguf

NUM_TOKENS = 12
PROMPT = list(range(100, 140))
KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q4_K, Kind.Q6_K)
MESSAGES = [{"role": "user", "content": "Who keeps a falcon?"}]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def read_by_transformers(file: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Return a file's model as transformers itself reads it, in bfloat16 and then float32."""
    with monkeypatch.context() as patch:
        patch.setattr(modeling_utils, "is_accelerate_available", lambda: True)  # its presence is only checked
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    converted: PreTrainedModel = model.to(torch.float32)
    return converted


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_greedy_tokens_equal_those_of_transformers(
    kind: Kind, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", Content(kind))
    expected = continue_greedily(read_by_transformers(file, monkeypatch), PROMPT, NUM_TOKENS)
    request = Request(PROMPT)
    backend = open_backend(
        Path(local_model(str(file), cache)), PolicyOptions(PolicyName.FULL), max_model_len=64
    )
    Driver(backend, chunk=16).run(request, num_tokens=NUM_TOKENS)
    backend.close()
    assert request.tokens == expected.tokens


@pytest.mark.long
def test_greedy_tokens_of_smollm2_equal_those_of_transformers(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = smollm2_file()
    if file is None:
        pytest.skip("SmolLM2 is not installed: scripts/setup-model")
    folder = local_model(str(file), cache)
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.info.bos_token, tokenizer.info.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.decode(sorted(tokenizer.stop_token_ids)) == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("Hello there", add_special_tokens=True)) == "Hello there"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.render_chat(question, add_generation_prompt=True, continue_final_message=False)
    request = Request(list(prompt))
    backend = open_backend(Path(folder), PolicyOptions(PolicyName.FULL), max_model_len=128)
    Driver(backend, chunk=16).run(request, num_tokens=NUM_TOKENS)
    backend.close()
    expected = continue_greedily(read_by_transformers(file, monkeypatch), request.prompt, NUM_TOKENS)
    assert request.tokens == expected.tokens
    assert "Paris" in tokenizer.decode(request.tokens)


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.W8A8])
def test_a_converted_model_can_be_quantized(quantization: Quantization, tmp_path: Path, cache: Path) -> None:
    folder = local_model(str(write_gguf(tmp_path / "tiny.gguf")), cache)
    request = Request(PROMPT)
    backend = open_backend(
        Path(folder), PolicyOptions(PolicyName.FULL), max_model_len=64, quantization=quantization
    )
    Driver(backend, chunk=16).run(request, num_tokens=NUM_TOKENS)
    backend.close()
    assert len(request.tokens) == NUM_TOKENS


def test_tokenizer_and_template_are_those_of_the_file(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    tokenizer = Tokenizer.load(local_model(str(file), cache))
    expected: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    text = "Marta keeps a brave falcon.\n\n  Who?"
    assert tokenizer.encode(text, add_special_tokens=True) == tuple(expected(text).input_ids)
    assert tokenizer.info.chat_template == TEMPLATE
    prompt = tokenizer.render_chat(MESSAGES, add_generation_prompt=True, continue_final_message=False)
    assert list(prompt) == expected.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_is_added_as_the_file_says(adds_bos: bool, tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", Content(edit=lambda writer: set_bos(writer, adds_bos)))
    ids = Tokenizer.load(local_model(str(file), cache)).encode("Who?", add_special_tokens=True)
    assert (ids[0] == 1) is adds_bos


def set_bos(writer: Any, adds_bos: bool) -> None:
    for fields in writer.kv_data:
        fields.pop("tokenizer.ggml.add_bos_token", None)
    writer.add_add_bos_token(adds_bos)


def test_answers_end_at_every_end_token_of_the_file(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", Content(edit=lambda writer: writer.add_eot_token_id(5)))
    assert {2, 5} <= Tokenizer.load(local_model(str(file), cache)).stop_token_ids


def test_a_second_start_reads_the_folder_without_gguf(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    folder = local_model(str(file), cache)
    times = {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from pathlib import Path\n"
        "from backends.conversion import local_model\n"
        "print(local_model(sys.argv[1], Path(sys.argv[2])))\n"
        "assert 'transformers' not in sys.modules"
    )
    again = subprocess.run(
        [sys.executable, "-c", code, str(file), str(cache)], check=True, capture_output=True, text=True
    )
    assert again.stdout.strip() == folder
    assert {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()} == times


def test_a_changed_file_is_converted_again(tmp_path: Path, cache: Path) -> None:
    first = local_model(str(write_gguf(tmp_path / "tiny.gguf", seed=0)), cache)
    assert local_model(str(write_gguf(tmp_path / "tiny.gguf", seed=1)), cache) != first


def test_a_renamed_file_keeps_its_folder(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    first = local_model(str(file), cache)
    assert local_model(str(file.rename(tmp_path / "other.gguf")), cache) == first


def test_starts_at_the_same_time_share_one_folder(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(
        "backends.torch_backend.model.gguf_file.convert",
        lambda _file, folder: (folder / "config.json").write_text("{}"),
    )
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: local_model(str(file), cache), range(8)))
    assert [str(path) for path in cache.iterdir()] == list(folders)


def test_a_folder_with_one_file_is_a_model(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = write_gguf(folder / "tiny.gguf")
    assert local_model(str(folder), cache) == local_model(str(file), cache)
    assert model_id(str(folder)) == model_id(str(file)) == "tiny"


def test_folders_and_hub_ids_stay_as_they_are(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "tiny.gguf").touch()
    for name in (str(tmp_path), "meta-llama/Llama-3.1-8B"):
        assert local_model(name, cache) == model_id(name) == name
    assert not cache.exists()


def test_a_hub_file_is_downloaded(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    calls = []

    def download(repository: str, name: str) -> str:
        calls.append((repository, name))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert local_model("owner/name/folder/tiny.gguf", cache) == local_model(str(file), cache)
    assert calls == [("owner/name", "folder/tiny.gguf")]
    assert model_id("owner/name/folder/tiny.gguf") == "tiny"


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path, cache: Path) -> None:
    old = cache / "partial-old"
    new = cache / "partial-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    local_model(str(write_gguf(tmp_path / "tiny.gguf")), cache)
    assert (old.exists(), new.exists()) == (False, True)


def test_the_conversion_is_logged(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    with caplog.at_level(logging.INFO, "backends"):
        local_model(str(file), cache)
    assert f"converting {file}" in caplog.text
    assert f"MB) to bfloat16 weights in {cache}" in caplog.text


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.5, 0.99])
def test_a_truncated_file_is_refused(share: float, tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf cannot be read as GGUF, is it complete\?"):
        local_model(str(file), cache)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip archive"])
def test_a_file_that_is_no_gguf_is_refused(content: bytes, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match="is no GGUF file: it must start with the bytes GGUF"):
        local_model(str(tmp_path / "tiny.gguf"), cache)


def test_a_file_of_another_suffix_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"must be a folder, a hub id or a file that ends in \.gguf"):
        local_model(str(tmp_path / "model.bin"), cache)


def test_a_missing_file_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no such file"):
        local_model(str(tmp_path / "missing.gguf"), cache)


def test_several_files_in_a_folder_are_listed(tmp_path: Path, cache: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"2 GGUF files: a\.gguf, b\.gguf\. Name one: --model .*a\.gguf"):
        local_model(str(tmp_path), cache)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Content(architecture="unheard"), "cannot read GGUF files of architecture 'unheard'"),
        (Content(architecture="mamba"), "mamba: layers of type linear_attention are not supported"),
        (Content(edit=lambda writer: writer.add_uint16("split.count", 3)), "one of 3 parts"),
        (
            Content(edit=lambda writer: writer.add_string("llama.rope.scaling.type", "yarn")),
            "does not read rope scaling of type 'yarn'",
        ),
        (
            Content(
                edit=lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(16, np.float32))
            ),
            "does not read rope_factors_long and rope_factors_short",
        ),
        (
            Content(
                architecture="phi3", edit=lambda writer: writer.add_uint32("phi3.rope.dimension_count", 24)
            ),
            "rotary positions turn 24 of a head's 32 numbers",
        ),
    ],
    ids=["unknown", "mamba", "part", "rope scaling", "rope factors", "partial rotary positions"],
)
def test_an_unsupported_model_is_refused(content: Content, message: str, tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", content)
    with pytest.raises(UnsupportedModelError, match=message):
        local_model(str(file), cache)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rope_scaling_of_llama_3_is_read_from_its_divisors(
    factor: float, tmp_path: Path, cache: Path
) -> None:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    divisors = (frequencies(plain) / frequencies(scaled)).numpy()
    edit = Content(edit=lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    folder = local_model(str(write_gguf(tmp_path / "tiny.gguf", edit)), cache)
    config: Any = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters == pytest.approx(scaled)


def test_other_divisors_are_refused(tmp_path: Path, cache: Path) -> None:
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    edit = Content(edit=lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    file = write_gguf(tmp_path / "tiny.gguf", edit)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight is not the scaling of Llama 3\.1"):
        local_model(str(file), cache)


def frequencies(rope_parameters: dict[str, Any]) -> torch.Tensor:
    config = LlamaConfig(head_dim=32, rope_parameters=rope_parameters)
    embedding: Any = LlamaRotaryEmbedding(config)
    inverse: torch.Tensor = embedding.inv_freq
    return inverse


def test_a_file_without_tokenizer_is_refused(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", Content(has_tokenizer=False))
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        local_model(str(file), cache)


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match=r"cannot be written to .*: File exists\. XDG_CACHE_HOME"):
        local_model(str(write_gguf(tmp_path / "tiny.gguf")), tmp_path / "file")


def test_a_full_disk_is_reported(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ModelLoadError, match=r"0 MB are free, and \d+ MB are needed"):
        local_model(str(file), cache)
    assert not list(cache.iterdir())


def test_the_cache_is_beside_the_compiled_code() -> None:
    assert conversion.GGUF_CACHE.parent == CACHE
