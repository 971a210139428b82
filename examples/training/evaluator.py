"""A trained model under plain transformers, for evaluation without a server."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Evaluator:
    """A model in float32 and its tokenizer."""

    # Any: the annotations of transformers leave the type open.
    tokenizer: Any
    model: Any

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def count_tokens(self, text: str) -> int:
        """Return the text's length in tokens."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def generate(self, prompt: torch.Tensor, max_new_tokens: int) -> str:
        """Continue a prompt of ids [1, token] greedily, and return the text without special tokens."""
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        text: str = self.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        return text
