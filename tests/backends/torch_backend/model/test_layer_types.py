"""Types of layers come in the same order in processes that hash their names differently."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.checkpoints import save_checkpoint
from tests.paths import ROOT

# Prints the types of layers in the order in which the model asks for their rotary embeddings.
_PROGRAM = """
import contextlib, sys, torch
from backends.torch_backend.model.layer_types import order_layer_types
from backends.torch_backend.model.loading import load_model
from backends.torch_backend.config import DeviceName, DtypeName
model = load_model(sys.argv[1], DeviceName.CPU, DtypeName.FLOAT32)
if sys.argv[2] == "ordered":
    order_layer_types(model)
rotary = model.model.rotary_emb
forward = rotary.forward
asked = []
rotary.forward = lambda hidden, positions, kind: asked.append(kind) or forward(hidden, positions, kind)
with contextlib.suppress(NotImplementedError):  # attention, which comes later, has no cache
    model(torch.tensor([[5, 6]]))
print(",".join(asked))
"""


def _orders(path: Path, how: str) -> set[str]:
    """Return the orders of two processes whose hashes of the names differ."""
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(path), how],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1")  # of which Python 3.11 makes two orders
    ]
    return {command.communicate(timeout=120)[0].strip() for command in commands}


@pytest.mark.long
def test_rotary_embeddings_come_in_one_order_in_every_process(tmp_path: Path) -> None:
    path = save_checkpoint("gemma3", tmp_path)
    assert _orders(path, "ordered") == {"full_attention,sliding_attention"}
    assert len(_orders(path, "as it is")) == 2, "the order depends on the process"
