"""Answer prompts with NVIDIA's kvpress. Runs in kvpress's environment and imports nothing of ours.

Usage: `python -P bench/fidelity/kvpress_worker.py JOB.json`. The job has the model's folder, the type of its
weights, one of PRESSES (or null for the full cache), and the prompts. A prompt has token ids, the number of
them that prefill reads, the most tokens of the answer, and kvpress's `compression_ratio`.

The first line of the output has versions and settings. One line for each prompt follows, with the answer's
token ids. With `reports_entries` it also has the tokens that each layer's KV heads hold after prefill.
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


class RecordingSnapKV(kvpress.SnapKVPress):  # type: ignore[misc, unused-ignore]
    """Records kvpress's scores, and the entries that it keeps."""

    kept: ClassVar[list[Any]] = []  # [layer][kv_head][entry] of the current prompt
    scores: ClassVar[list[Any]] = []  # [layer][kv_head][candidate]

    def score(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        scores: torch.Tensor = super().score(*args, **kwargs)
        num_kept = kvpress.utils.compute_n_kept(scores.shape[-1], self.compression_ratio)
        self.kept.append(scores.topk(num_kept, dim=-1).indices[0].sort().values.tolist())
        self.scores.append(scores[0, :, : -self.window_size].tolist())
        return scores


PRESSES = {
    "SnapKV": RecordingSnapKV,
    "StreamingLLM": kvpress.StreamingLLMPress,
    "ChunkKV": lambda: kvpress.ChunkKVPress(RecordingSnapKV()),
    "AdaKV": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress()),
    "KVzip": kvpress.KVzipPress,
    "TOVA": kvpress.TOVAPress,
    "Random": lambda: kvpress.RandomPress(seed=0),
}


def is_sliding(module: Any) -> bool:
    """Return whether an attention layer has a sliding window. Few model classes say so themselves."""
    layer_types = getattr(module.config, "layer_types", None)
    if layer_types is not None:
        return bool(layer_types[module.layer_idx] == "sliding_attention")
    return getattr(module.config, "sliding_window", None) is not None


def skip_sliding_layers(press: Any) -> None:
    """Let the press compress only the layers without a sliding window, as our slots do."""
    compress = press.forward_hook

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        return output if is_sliding(module) else compress(module, args, kwargs, output)

    press.forward_hook = hook


def answer(model: Any, press: Any, prompt: dict[str, Any]) -> list[int]:
    """Prefill a prompt's first part, compress, and decode greedily, like `KVPressTextGenerationPipeline`."""
    num_read = prompt["num_prefill_tokens"]
    eos = model.generation_config.eos_token_id
    stops = eos if isinstance(eos, list) else [eos]
    token_ids = torch.tensor([prompt["token_ids"]], device=model.device)
    cache = transformers.DynamicCache(config=model.config)
    with press(model) if press is not None else nullcontext():
        model.model(input_ids=token_ids[:, :num_read], past_key_values=cache)
    answer_ids: list[int] = []
    # One token at a time: where some layers are compressed and others not, the mask of several is wrong.
    pending = prompt["token_ids"][num_read:]
    position = num_read
    while len(answer_ids) < prompt["max_tokens"]:
        token = pending.pop(0)
        logits = model(
            input_ids=torch.tensor([[token]], device=model.device),
            past_key_values=cache,
            position_ids=torch.tensor([[position]], device=model.device),
        ).logits
        position += 1
        if pending:
            continue
        token = int(logits[0, -1].argmax())
        if token in stops:
            break
        answer_ids.append(token)
        pending.append(token)
    return answer_ids


@torch.inference_mode()
def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"])
    model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    press = None if job["press"] is None else PRESSES[job["press"]]()
    if press is not None:
        skip_sliding_layers(press)
    versions = [f"{name} {version(name)}" for name in ("kvpress", "transformers", "torch")]
    print(json.dumps({"press": str(press), "versions": versions}), flush=True)
    for prompt in job["prompts"]:
        RecordingSnapKV.kept.clear()
        RecordingSnapKV.scores.clear()
        if press is not None:
            press.compression_ratio = prompt["compression_ratio"]
        line = {"token_ids": answer(model, press, prompt)}
        if job["reports_entries"]:
            line |= {"entries": RecordingSnapKV.kept, "scores": RecordingSnapKV.scores}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
