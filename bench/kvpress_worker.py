"""Answer prompts through NVIDIA's kvpress. It runs in an environment of kvpress' and imports nothing of ours.

Usage: `python -P bench/kvpress_worker.py JOB.json`. The job names the model's folder and the type of its weights, and has `prompts`: token
ids, how many of them prefill reads, the most tokens of the answer. `press` is one of PRESSES, or none for the whole cache; each prompt's
`compression_ratio` is kvpress' own. The first line of the output tells versions and settings; then comes one for each prompt, of the
answer's token ids and, with `tells_entries`, of the tokens that each layer's KV heads hold after prefill.
"""

import json
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import kvpress  # type: ignore[import-not-found, unused-ignore]
import torch
import transformers


class TellingSnapKV(kvpress.SnapKVPress):  # type: ignore[misc, unused-ignore]
    """Notes what is kept: kvpress' own scores, and its own choice by them."""

    kept: ClassVar[list[Any]] = []  # [layer][kv_head][entry] of the prompt that is being read
    scores: ClassVar[list[Any]] = []  # [layer][kv_head][candidate]

    def score(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        scores: torch.Tensor = super().score(*args, **kwargs)
        num_kept = kvpress.utils.compute_n_kept(scores.shape[-1], self.compression_ratio)
        self.kept.append(scores.topk(num_kept, dim=-1).indices[0].sort().values.tolist())
        self.scores.append(scores[0, :, : -self.window_size].tolist())
        return scores


PRESSES = {
    "SnapKV": TellingSnapKV,
    "StreamingLLM": kvpress.StreamingLLMPress,
    "ChunkKV": lambda: kvpress.ChunkKVPress(TellingSnapKV()),
}


def answer(model: Any, press: Any, prompt: dict[str, Any]) -> list[int]:
    """Read a prompt's first part, compress, and go on from there greedily, as `KVPressTextGenerationPipeline` does."""
    num_read, stops = prompt["num_prefill_tokens"], model.generation_config.eos_token_id
    token_ids = torch.tensor([prompt["token_ids"]])
    cache = transformers.DynamicCache()
    with press(model) if press is not None else nullcontext():
        model.model(input_ids=token_ids[:, :num_read], past_key_values=cache)
    given: list[int] = []
    asked, position = token_ids[:, num_read:], num_read
    while len(given) < prompt["max_tokens"]:
        positions = torch.arange(position, position + asked.shape[1])[None]
        logits = model(
            input_ids=asked, past_key_values=cache, position_ids=positions, logits_to_keep=1
        ).logits
        token = int(logits[0, -1].argmax())
        if token in (stops if isinstance(stops, list) else [stops]):
            break
        given.append(token)
        asked, position = torch.tensor([[token]]), position + asked.shape[1]
    return given


@torch.inference_mode()
def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"])
    model.eval()
    press = None if job["press"] is None else PRESSES[job["press"]]()
    versions = [f"{name} {version(name)}" for name in ("kvpress", "transformers", "torch")]
    print(json.dumps({"press": str(press), "versions": versions}), flush=True)
    for prompt in job["prompts"]:
        TellingSnapKV.kept.clear()
        TellingSnapKV.scores.clear()
        if press is not None:
            press.compression_ratio = prompt["compression_ratio"]
        given = answer(model, press, prompt)
        told = {"entries": TellingSnapKV.kept, "scores": TellingSnapKV.scores} if job["tells_entries"] else {}
        print(json.dumps({"token_ids": given, **told}), flush=True)


if __name__ == "__main__":
    main()
