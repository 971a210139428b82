"""What a quantised checkpoint needs of memory while it is loaded and packed."""

import gc
import json
import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from backends.torch_backend.config import DeviceName, DtypeName, Quantization
from backends.torch_backend.model.allocation import returning_memory
from backends.torch_backend.model.linear import KINDS, replace_all_linears
from backends.torch_backend.model.loading import load_model
from backends.torch_backend.native.kernels import Kernels
from tests.backends.families import edit_weights, save_tiny, stored_weights, tiny_config
from tests.backends.torch_backend.model.test_dequantization import quantise

MOST = 1.25  # of the weights that are held
NUM_LAYERS = 14


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def _measure(warm_up: str, folder: str) -> tuple[int, int]:
    """Return the bytes of the weights, and the most that were resident beyond what was before."""
    load_model(warm_up, DeviceName.CPU, DtypeName.AUTO)  # imports the model's code
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # starts VmHWM anew
    with returning_memory(), torch.inference_mode():
        model = load_model(folder, DeviceName.CPU, DtypeName.AUTO)
        held = sum(weight.nbytes for weight in model.parameters())
        replace_all_linears(model, Kernels(), KINDS[Quantization.NONE])
    return held, _resident("VmHWM") - before


def _repeat_layer(folder: Path) -> None:
    """Give a checkpoint of one layer copies of it: to draw and to quantise all layers takes long."""
    weights = stored_weights(folder)
    for name, weight in list(weights.items()):
        if ".layers.0." in name:
            copies = range(1, NUM_LAYERS)
            weights |= {name.replace(".layers.0.", f".layers.{copy}."): weight.clone() for copy in copies}
    edit_weights(folder, weights)
    path = folder / "config.json"
    layers = {"num_hidden_layers": NUM_LAYERS, "layer_types": ["full_attention"] * NUM_LAYERS}
    path.write_text(json.dumps(json.loads(path.read_text()) | layers))


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("kind", ["compressed-fp8", "gptq-4"])
def test_peak_is_near_the_weights(kind: str, tmp_path: Path) -> None:
    warm_up, folder = tmp_path / "warm-up", tmp_path / "model"
    save_tiny(tiny_config("qwen3"), warm_up)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)  # type: ignore[no-untyped-call]
    quantise(folder, kind, dtype="bfloat16")
    _repeat_layer(folder)
    assert any(weight.dtype is not torch.bfloat16 for weight in stored_weights(folder).values())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        held, peak = pool.apply(_measure, (str(warm_up), str(folder)))
    assert held > 400e6
    assert peak <= MOST * held, f"{peak / 1e6:.0f} MB for {held / 1e6:.0f} MB of weights"
