"""Compare policy sparse with a control that chooses worse on purpose, on the tasks of `snapserve eval ruler`.

The control chooses groups of eight neighbouring tokens by the mean of their keys (landmarks, as ShadowKV has
them, arXiv 2410.21465), instead of each token by its own key. Both attend to as many tokens of the same
slots. Tasks on which the control loses nothing cannot show a loss. The score of a mean of keys is the mean of
their scores. Decode runs uncompiled, since the kernel has its own choice.

Usage: `python -m bench.sparse_control [--model DIR] [--tasks kv_lookup qa_1] [--num-cases 5] [--length 4096]
[--num-attended 128]`.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import closing
from unittest.mock import patch

from torch import Tensor
from torch.nn.functional import pad

from backends.clock import VirtualClock
from backends.interface import DecodeBatch, DecodeRow, PrefillBatch, PrefillRow
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.model import sparse_attention
from bench.decode import GREEDY
from commands.eval.options import EVAL_MODEL, Pack
from commands.eval.prompts import Prompt, PromptWriter, load_tokenizer
from commands.eval.scoring import score
from commands.eval.setting import serve_config
from commands.eval.tasks.suite import TASKS
from server.text.tokenizer import Tokenizer

GROUP = 8

Strengths = Callable[[Tensor], Tensor]


def group_strengths(scores: Tensor) -> Tensor:
    """Return the strength of each token's group, [row, kv_head, token]: see `sparse_attention.strengths`."""
    num_tokens = scores.shape[3]
    padded = pad(scores, (0, -num_tokens % GROUP))
    means = padded.view(*scores.shape[:3], -1, GROUP).mean(dim=4)
    strengths = means.log_softmax(dim=-1).amax(dim=2)
    return strengths.repeat_interleave(GROUP, dim=2)[:, :, :num_tokens]


CHOICES: dict[str, Strengths] = {"own keys": sparse_attention.strengths, "means": group_strengths}


def read(backend: TorchBackend, token_ids: tuple[int, ...]) -> None:
    """Read a prompt into a slot for each choice."""
    shape = max(backend.spec.prefill_shapes, key=lambda shape: (shape.num_tokens, -shape.num_rows))
    slots = tuple(range(len(CHOICES)))
    for start in range(0, len(token_ids), shape.num_tokens):
        chunk = token_ids[start : start + shape.num_tokens]
        row = PrefillRow("control", chunk, start, len(token_ids), slots, scratch=0)
        backend.submit(PrefillBatch((row,), shape)).result()


def answer(backend: TorchBackend, tokenizer: Tokenizer, prompt: Prompt, slot: int) -> str:
    """Return the greedy answer from a slot that holds the prompt as far as prefill reads it."""
    tokens = list(prompt.token_ids)
    first = prompt.num_prefill_tokens
    while len(tokens) < len(prompt.token_ids) + prompt.max_tokens:
        row = DecodeRow("control", slot, tokens[first], first, prompt.num_prefill_tokens, GREEDY)
        token_id = backend.submit(DecodeBatch((row,))).result().tokens[0][0].token_id
        first += 1
        if first == len(tokens):
            if token_id in tokenizer.stop_token_ids:
                break
            tokens.append(token_id)
    return tokenizer.decode(tokens[len(prompt.token_ids) :])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default=str(EVAL_MODEL))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["niah_multikey_1", "qa_1", "kv_lookup"])
    parser.add_argument("--num-cases", type=int, default=5)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--num-attended", type=int, default=128)
    parsed = parser.parse_args()
    tokenizer = load_tokenizer(parsed.model)
    writer = PromptWriter(tokenizer, parsed.length, Pack.BEFORE_ANSWER, uses_chat_template=False)
    sizes = f"--num-attended {parsed.num_attended} --num-slots {len(CHOICES)} --num-scratch 1"
    options = f"--policy sparse --no-compile --prefix-cache-bytes 0 --max-model-len {parsed.length + 512}"
    config = serve_config(("--model", parsed.model, *sizes.split(), *options.split())).backend.config
    print(f"| task, {parsed.num_cases} cases | {' | '.join(CHOICES)} |\n|---|{'---|' * len(CHOICES)}")
    with closing(TorchBackend(config, VirtualClock())) as backend:
        for task in parsed.tasks:
            totals = [0.0] * len(CHOICES)
            for index in range(parsed.num_cases):
                prompt = writer.write(TASKS[task], 0, index)
                read(backend, tuple(prompt.token_ids[: prompt.num_prefill_tokens]))
                for slot, strengths in enumerate(CHOICES.values()):
                    with patch.object(sparse_attention, "strengths", strengths):
                        totals[slot] += score(prompt.case, answer(backend, tokenizer, prompt, slot))
            means = (f"{100 * total / parsed.num_cases:.1f}" for total in totals)
            print(f"| `{task}` | {' | '.join(means)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
