"""The matrix of model types: tokens of transformers' `generate`, or a refusal that says why.

Checks the tables of `docs/reference/models.md`. This writes them:
`python -m tests.backends.torch_backend.model.test_families`.
"""

import tempfile
from pathlib import Path
from typing import Final

import pytest
import torch

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.errors import UnsupportedModelError
from backends.torch_backend.model.language_model import text_config
from backends.torch_backend.model.probe import probe_layers
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from tests.backends.driver import Driver, Request, open_backend
from tests.backends.families import FAMILIES, save_tiny, tiny_config
from tests.backends.oracle import assert_same_logprobs, random_prompt
from tests.backends.torch_backend.test_exact_full import OBSERVED
from tests.paths import DOCS

DOCUMENT: Final = DOCS / "reference" / "models.md"
NUM_TOKENS: Final = 13
LENGTHS: Final = (5, 29)  # one chunk, and several, beyond every sliding window

# transformers' classes of the whole model leave out the scale that their language model's own class applies.
UNSCALED: Final = ("aya_vision", "cohere2_vision")

# transformers bounds the time steps of Mamba-2 while it reads tokens, and not when it decodes them.
BOUNDED: Final = ("nemotron_h",)
# What the layers with states are, by how many they have.
_STATES: Final = {1: "short convolutions", 2: "recurrent states with convolutions"}


def _rows(heading: str) -> dict[str, str]:
    """Return the second column of the table under a heading of the document, by the first."""
    section = DOCUMENT.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {cell[0].strip(" `"): cell[1].strip() for cell in cells}


def _served(model_type: str, folder: Path) -> str:
    """Compare a type with transformers; return a description. Raises UnsupportedModelError."""
    config = tiny_config(model_type)
    oracle = save_tiny(config, folder)
    backend = open_backend(folder, PolicyOptions(PolicyName.FULL), max_model_len=64)
    for length in LENGTHS:
        request = Request(random_prompt(length), slots=(1,), sampling=OBSERVED)
        Driver(backend, 8).run(request, num_tokens=NUM_TOKENS)
        output = oracle.generate(  # type: ignore[operator]
            torch.tensor([request.prompt]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert request.tokens == output.sequences[0, length:].tolist()
        with torch.no_grad():
            logits = oracle(output.sequences[:, :-1]).logits[0, length - 1 :]
        if model_type in BOUNDED:
            logits = torch.cat(output.logits)
        if model_type in UNSCALED:
            logits = logits * text_config(config).logit_scale
        assert_same_logprobs(request.outputs[0], logits, 20)
    description = _attention(backend)
    backend.close()
    return description if text_config(config) is config else f"{description}; text part"


def _attention(backend: TorchBackend) -> str:
    layers = probe_layers(backend._model)
    attending = [layer for layer in layers if layer.attends]
    windows = {layer.sliding_window is not None for layer in attending}
    kinds = {(False,): "full", (True,): "sliding window", (False, True): "full and sliding window"}
    kind = "latents" if len(attending[0].planes) == 1 else kinds[tuple(sorted(windows))]
    if any(layer.readers for layer in layers):
        kind = f"{kind}, shared between layers"
    states = {len(layer.states) for layer in layers} - {0}
    return f"{kind}; {_STATES[states.pop()]}" if states else kind


def _outcome(model_type: str, folder: Path) -> tuple[bool, str]:
    """Return whether a type is served, and how, or why not."""
    try:
        return True, _served(model_type, folder)
    except UnsupportedModelError as error:
        return False, str(error).removeprefix(f"{model_type}: ").replace("|", r"\|")


@pytest.mark.long
@pytest.mark.parametrize("model_type", FAMILIES)
def test_type(model_type: str, tmp_path: Path) -> None:
    served, refused = _rows("Served"), _rows("Refused")
    is_served, words = _outcome(model_type, tmp_path)
    assert (served if is_served else refused).get(model_type) == words


def test_the_document_names_enough_types() -> None:
    served, refused = _rows("Served"), _rows("Refused")
    assert served.keys() | refused.keys() == set(FAMILIES)
    assert len(served) >= 45


def write(folder: Path) -> None:
    """Write the document's tables."""
    outcomes = {name: _outcome(name, folder / name) for name in FAMILIES}
    served = [f"| `{name}` | {words} |" for name, (is_served, words) in outcomes.items() if is_served]
    refused = [f"| `{name}` | {words} |" for name, (is_served, words) in outcomes.items() if not is_served]
    introduction = DOCUMENT.read_text().partition("## Served\n")[0]
    DOCUMENT.write_text(
        f"{introduction}## Served\n\n{len(served)} types.\n\n| type | attention |\n|---|---|\n"
        + "\n".join(served)
        + f"\n\n## Refused\n\n{len(refused)} types.\n\n| type | reason |\n|---|---|\n"
        + "\n".join(refused)
        + "\n"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
