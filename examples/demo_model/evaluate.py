"""Measure how many held-out questions the demo model answers exactly.

`python -m examples.demo_model.evaluate --model DIR` decodes greedily with plain transformers, twice from each
prompt: with the full cache, and with the entries of a slot. After the prompt, a slot keeps the first entries
of each layer and head (sinks), the last (ring), and those between that the prompt's end attends to most. This
models a server with fixed slots, and shares no code with one.
"""

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache

from examples.demo_model.corpus import Case, make_case
from examples.training import evaluator

MAX_NEW_TOKENS = 32
NUM_SINKS = 4
NUM_RING = 510
NUM_SELECTED = 510
SLOT_CAPACITY = NUM_SINKS + NUM_RING + NUM_SELECTED
NUM_OBSERVING = 32  # the last prompt tokens, whose attention selects the entries
POOLING_WIDTH = 7  # a score is the maximum of its neighbourhood, so that entries are kept with their context


@dataclass(frozen=True)
class Setting:
    """One row of the table: the documents' length, and how near to their end the fact is (None: anywhere)."""

    num_tokens: int
    within_last: int | None = None

    @property
    def title(self) -> str:
        """The row's description."""
        position = "anywhere" if self.within_last is None else f"in the last {self.within_last} tokens"
        return f"{self.num_tokens:,} | {position}"


SETTINGS = (
    Setting(256),
    Setting(1024),
    Setting(2048),
    Setting(4096),
    Setting(8192, within_last=450),
    Setting(8192),
)


class Evaluator(evaluator.Evaluator):
    """The demo model, which answers cases with the full cache or with a slot's entries."""

    def answer(self, messages: list[dict[str, str]]) -> str:
        """Answer the conversation greedily by the `generate` of transformers."""
        return self.generate(self._encode(messages), MAX_NEW_TOKENS)

    def is_exact(self, case: Case) -> bool:
        """Whether the case is answered exactly."""
        return self.answer(case.messages).strip() == case.answer

    @torch.no_grad()
    def answer_twice(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        """Answer with the full cache and with a slot's entries, after one prefill."""
        prompt = self._encode(messages)
        cache = DynamicCache(config=self.model.config)
        border = prompt.shape[1] - NUM_OBSERVING
        self.model.set_attn_implementation("sdpa")
        self.model(prompt[:, :border], past_key_values=cache, logits_to_keep=1)
        self.model.set_attn_implementation("eager")  # only eager attention returns its weights
        output = self.model(prompt[:, border:], past_key_values=cache, output_attentions=True)
        self.model.set_attn_implementation("sdpa")
        slot = copy.deepcopy(cache)
        for layer, attention in zip(slot.layers, output.attentions, strict=True):
            _evict(layer, attention[0].sum(1))
        first = int(output.logits[0, -1].argmax())
        return self._continue(first, cache, prompt.shape[1]), self._continue(first, slot, prompt.shape[1])

    def _encode(self, messages: list[dict[str, str]]) -> torch.Tensor:
        prompt: torch.Tensor = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        return prompt

    def _continue(self, token: int, cache: DynamicCache, position: int) -> str:
        tokens: list[int] = []
        while token != self.model.config.eos_token_id and len(tokens) < MAX_NEW_TOKENS:
            positions = torch.tensor([[position + len(tokens)]])
            tokens.append(token)
            token = int(
                self.model(torch.tensor([[token]]), past_key_values=cache, position_ids=positions)
                .logits[0, -1]
                .argmax()
            )
        text: str = self.tokenizer.decode(tokens)
        return text


def _evict(layer: Any, scores: torch.Tensor) -> None:
    """Evict all entries of a cache layer but those of a slot, selected by scores [head, entry]."""
    length = scores.shape[1]
    if length <= SLOT_CAPACITY:
        return
    pooled = torch.nn.functional.max_pool1d(
        scores[None], POOLING_WIDTH, stride=1, padding=POOLING_WIDTH // 2
    )[0]
    pooled[:, :NUM_SINKS] = torch.inf
    pooled[:, -NUM_RING:] = torch.inf
    chosen = pooled.topk(SLOT_CAPACITY, dim=1).indices.sort(1).values  # [head, kept]
    index = chosen[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
    layer.keys = layer.keys.gather(2, index)
    layer.values = layer.values.gather(2, index)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=200, help="questions per row")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--lengths", type=int, nargs="+", help="only these lengths of documents, in tokens")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = Evaluator(arguments.model)
    print(
        f"document tokens | position of the fact | full cache | slot of {SLOT_CAPACITY:,}\n"
        "--- | --- | --- | ---"
    )
    for setting in SETTINGS:
        if arguments.lengths is None or setting.num_tokens in arguments.lengths:
            print(
                _row(model, setting, range(arguments.first_seed, arguments.first_seed + arguments.cases)),
                flush=True,
            )


def _row(model: Evaluator, setting: Setting, seeds: range) -> str:
    num_exact = 0
    num_exact_in_slot = 0
    for seed in tqdm(seeds, desc=setting.title, leave=False):
        case = make_case(seed, setting.num_tokens, model.count_tokens, within_last=setting.within_last)
        answer, answer_in_slot = model.answer_twice(case.messages)
        num_exact += answer.strip() == case.answer
        num_exact_in_slot += answer_in_slot.strip() == case.answer
    shares = (f"{count}/{len(seeds)} = {count / len(seeds):.1%}" for count in (num_exact, num_exact_in_slot))
    return " | ".join((setting.title, *shares))


if __name__ == "__main__":
    main()
