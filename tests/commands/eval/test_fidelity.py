"""Fidelity: against transformers' own distributions, and that a smaller slot strays further."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cache.policy import PolicyName
from commands.cli import main
from commands.eval.fidelity import FidelityConfig, measure_fidelity, read_windows
from commands.eval.setting import Setting
from examples.demo_model.corpus import make_case
from server.options.models import DEMO_MODEL
from server.text.tokenizer import Tokenizer

LENGTH, NUM_SCORED = 256, 24


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.load(str(DEMO_MODEL))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        make_case(0, 700, lambda text: len(tokenizer.encode(text, add_special_tokens=False))).prompt
    )
    return path


def config(text: Path, *settings: Setting) -> FidelityConfig:
    return FidelityConfig(str(DEMO_MODEL), settings, text, LENGTH, NUM_SCORED, 2, ("--dtype", "float32"))


def test_distributions_are_those_of_transformers(text: Path) -> None:
    """With all tokens held, the packed path and a plain forward pass are the same model."""
    given = config(text, Setting(PolicyName.FULL))
    run = measure_fidelity(given).runs[0]
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    windows = torch.tensor(read_windows(given))
    with torch.inference_mode():
        logprobs = model(windows).logits.log_softmax(-1)[:, LENGTH:-1]
    losses = -logprobs.gather(2, windows[:, LENGTH + 1 :, None])[..., 0]
    assert np.abs(run.kl).max() == 0
    assert run.agrees.all()
    assert run.full_loss == pytest.approx(losses.numpy(), abs=1e-3)


def test_a_smaller_slot_has_a_larger_error(text: Path) -> None:
    mild, hard, control = measure_fidelity(
        config(
            text,
            Setting(PolicyName.SNAPSTREAM, 1.2),
            Setting(PolicyName.STREAMING_LLM, 16.0),
            Setting(None, is_control=True),
        )
    ).runs
    assert 0 <= mild.kl.mean() < hard.kl.mean()
    assert hard.agrees.mean() < 1
    assert control.kl.mean() > mild.kl.mean()


def test_int8_weights_have_a_small_error(text: Path) -> None:
    """They are compared with the weights as they were, not with themselves."""
    given = config(text, Setting(PolicyName.FULL))
    run = measure_fidelity(
        replace(given, serve_options=(*given.serve_options, "--quantization", "int8"))
    ).runs[0]
    assert 0 < run.kl.mean() < 0.01
    assert run.agrees.mean() > 0.9


def test_the_command_prints_and_plots_the_errors(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    sizes = ("--length", "128", "--num-scored", "16", "--num-windows", "2", "--plot", str(plot))
    assert main(["eval", "fidelity", "--text", str(text), *sizes, "--json", "-"]) == 2
    said = capsys.readouterr().err
    assert (
        "--compression 4 at --length 128 leaves snapstream 32 entries: "
        "--slot-capacity must be at least 67 for policy" in said
    )
    assert (
        main(
            [
                "eval",
                "fidelity",
                "--text",
                str(text),
                *sizes,
                "--serve-options=--selection-options observation-window=8",
                "--json",
                "-",
            ]
        )
        == 0
    )
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (result["model"], result["num_windows"], result["runs"][0]["label"]) == (
        "eval_model",
        2,
        "snapstream 4x",
    )
    assert len(result["runs"][0]["kl_by_position"]) == 16
    assert "same top-1" in output.err
    assert "<svg" in plot.read_text()


def test_unreadable_texts_are_reported(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "fidelity"]) == 2
    assert main(["eval", "fidelity", "--text", "/does/not/exist"]) == 2
    assert main(["eval", "fidelity", "--text", str(text), "--length", "100000"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "--text must name a file" in errors[0]
    assert "cannot be read" in errors[1]
    assert "--length 100000 and --num-scored 256 need 100255" in errors[2]
