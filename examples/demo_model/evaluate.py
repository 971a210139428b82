"""Measure how many held-out questions the demo model answers exactly: `python -m examples.demo_model.evaluate --model DIR`.

Greedy decoding with plain transformers, from each prompt twice: with the whole cache, and with the cache of each layer and head cut down
after the prompt to the entries of a slot, which are the first ones (sinks), the last ones (ring), and of those between the ones that the
end of the prompt attends to most. The latter only models what a server with fixed slots does; it shares no code with one.
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
NUM_SINKS, NUM_RING, NUM_KEPT = 4, 510, 510
NUM_OBSERVING = 32  # the last prompt tokens, whose attention selects what is kept
POOLING_WIDTH = (
    7  # a score is the largest of its neighbourhood's, so that a selected entry brings its context
)


@dataclass(frozen=True)
class Setting:
    """One row of the table: the documents' length, and where the fact is told (None: anywhere)."""

    num_tokens: int
    within_last: int | None = None

    @property
    def title(self) -> str:
        """The row's description."""
        place = "anywhere" if self.within_last is None else f"in the last {self.within_last} tokens"
        return f"{self.num_tokens:,} | {place}"


SETTINGS = (
    Setting(256),
    Setting(1024),
    Setting(2048),
    Setting(4096),
    Setting(8192, within_last=450),
    Setting(8192),
)


class Evaluator(evaluator.Evaluator):
    """The demo model, which answers cases with the whole cache or with a slot's entries."""

    def answer(self, messages: list[dict[str, str]]) -> str:
        """Answer the conversation with the library's own `generate`, greedily."""
        return self.generate(self._encode(messages), MAX_NEW_TOKENS)

    def is_exact(self, case: Case) -> bool:
        """Whether the case is answered exactly."""
        return self.answer(case.messages).strip() == case.answer

    @torch.no_grad()
    def answer_twice(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        """Answer with the whole cache and with a slot's entries, from one reading of the prompt."""
        prompt = self._encode(messages)
        cache = DynamicCache(config=self.model.config)
        border = prompt.shape[1] - NUM_OBSERVING
        self.model.set_attn_implementation("sdpa")
        self.model(prompt[:, :border], past_key_values=cache, logits_to_keep=1)
        self.model.set_attn_implementation("eager")  # it alone returns what was attended to
        output = self.model(prompt[:, border:], past_key_values=cache, output_attentions=True)
        self.model.set_attn_implementation("sdpa")
        slot = copy.deepcopy(cache)
        for layer, attention in zip(slot.layers, output.attentions, strict=True):
            _cut_down(layer, attention[0].sum(1))
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


def _cut_down(layer: Any, scores: torch.Tensor) -> None:
    """Keep of a cache layer the entries of a slot; scores: what each got from the prompt's end  # [head, entry]."""
    length = scores.shape[1]
    if length <= NUM_SINKS + NUM_RING + NUM_KEPT:
        return
    pooled = torch.nn.functional.max_pool1d(
        scores[None], POOLING_WIDTH, stride=1, padding=POOLING_WIDTH // 2
    )[0]
    pooled[:, :NUM_SINKS] = torch.inf
    pooled[:, -NUM_RING:] = torch.inf
    chosen = pooled.topk(NUM_SINKS + NUM_RING + NUM_KEPT, dim=1).indices.sort(1).values  # [head, kept]
    index = chosen[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
    layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)


def main() -> None:
    """Read the arguments, ask, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=200, help="questions a row")
    parser.add_argument("--first-seed", type=int, default=0, help="the first case's seed")
    parser.add_argument("--lengths", type=int, nargs="+", help="leave other lengths out")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = Evaluator(arguments.model)
    print(
        f"document tokens | fact told | whole cache | slot of {NUM_SINKS + NUM_RING + NUM_KEPT:,}\n--- | --- | --- | ---"
    )
    for setting in SETTINGS:
        if arguments.lengths is None or setting.num_tokens in arguments.lengths:
            print(
                _row(model, setting, range(arguments.first_seed, arguments.first_seed + arguments.cases)),
                flush=True,
            )


def _row(model: Evaluator, setting: Setting, seeds: range) -> str:
    exact, exact_in_slot = 0, 0
    for seed in tqdm(seeds, desc=setting.title, leave=False):
        case = make_case(seed, setting.num_tokens, model.count_tokens, within_last=setting.within_last)
        answer, answer_in_slot = model.answer_twice(case.messages)
        exact += answer.strip() == case.answer
        exact_in_slot += answer_in_slot.strip() == case.answer
    whole, slot = (f"{count}/{len(seeds)} = {count / len(seeds):.1%}" for count in (exact, exact_in_slot))
    return f"{setting.title} | {whole} | {slot}"


if __name__ == "__main__":
    main()
