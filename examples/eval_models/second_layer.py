"""A change of the Llama's second layer between two training stages.

Its heads become distinct and attend to the highest number. The change works on any weights of
`build_model("llama", …)`, trained or not. The suite's texts give its size.
"""

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from commands.eval.tasks.case import Case
from commands.eval.tasks.extraction import ExtractionTask
from commands.eval.tasks.suite import TASKS, case_source
from examples.eval_models.model import FAR_FREQUENCY, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS

QUERY_NOISE = 0.3  # of the size of a head's query weights
NUM_NUMBERS = 9
# By this much a number's product exceeds the one before, which leaves the latter 5 % of the attention.
PRODUCT_STEP = 3.0
NUM_RECORD_TEXTS = 4
RECORD_TEXT_LENGTH = 3000  # characters
NUM_OTHER_TEXTS = 2  # of each task
OTHER_TEXT_LENGTH = 4000  # characters
RIDGE = 1e-3  # of the mean variance, so that the moment matrix can be inverted
GROUP = NUM_HEADS // NUM_KV_HEADS


@torch.no_grad()
def change_second_layer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise the second layer's products from number to number, and make its heads distinct."""
    _raise_numbers(model, tokenizer)
    _make_distinct(model)


def _make_distinct(model: LlamaForCausalLM) -> None:
    """Add noise to the queries.

    Heads of one key-value head start equal (`shape_start`), and training alone would keep them equal.
    """
    weight = model.model.layers[1].self_attn.q_proj.weight
    size = weight.unflatten(0, (NUM_HEADS, -1)).square().mean((1, 2)).sqrt().repeat_interleave(HEAD_DIM)
    weight += (
        QUERY_NOISE * size[:, None] * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    )


def _raise_numbers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise the keys of the numbers from 3 on for the query before a record's number.

    That query then attends to the last number written. Of all such changes this is the one that changes other
    products least. It needs heads that are still equal.
    """
    attention = model.model.layers[1].self_attn
    records = [_LayerInput(model, tokenizer, case) for case in _record_cases()]
    others = [_LayerInput(model, tokenizer, case) for case in _other_cases()]
    hidden = torch.cat([text.hidden for text in [*records, *others]])
    mean_numbers = torch.stack([text.hidden[text.numbers[:-1]] for text in records]).mean(0)
    numbers = _detectors(mean_numbers, hidden)  # [number, hidden]
    missing = _missing_products(torch.stack([text.products() for text in records]).mean(0))
    # Only rotary pairs that hardly turn are changed: their product is the same at every distance.
    slow = (model.model.rotary_emb.inv_freq < FAR_FREQUENCY).repeat(2)
    before = torch.cat([text.hidden[text.numbers[1:] - 1] for text in records])  # the queries' inputs
    for head in range(NUM_KV_HEADS):
        to_query = attention.q_proj.weight[GROUP * head * HEAD_DIM :][:HEAD_DIM][slow]
        query = _detectors((before @ to_query.T).mean(0, keepdim=True), hidden @ to_query.T)[0]
        rows = head * HEAD_DIM + slow.nonzero()[:, 0]
        attention.k_proj.weight[rows] += torch.outer(query, missing[head] @ numbers) / attention.scaling


def _missing_products(products: torch.Tensor) -> torch.Tensor:
    """Return the terms that make products rise by `PRODUCT_STEP` from number 2 on [kv_head, number]."""
    wanted = products[:, 1:2] + PRODUCT_STEP * (torch.arange(NUM_NUMBERS) - 1)
    return torch.where(torch.arange(NUM_NUMBERS) < 2, 0.0, wanted - products)


def _detectors(targets: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
    """Return for each target the vector that detects it [target, dim].

    Its product is 1 with its target and 0 with the other targets. Under these constraints the mean square of
    its products with the background [token, dim] is least.
    """
    moment = background.T @ background / len(background)
    inverse = torch.linalg.inv(moment + RIDGE * moment.diagonal().mean() * torch.eye(len(moment)))
    detectors: torch.Tensor = torch.linalg.solve(targets @ inverse @ targets.T, targets @ inverse)
    return detectors


def _record_cases() -> list[Case]:
    task = ExtractionTask(num_records=NUM_NUMBERS + 1)
    return [
        task.make(case_source(task.name, 0, index, "train"), RECORD_TEXT_LENGTH, len)
        for index in range(NUM_RECORD_TEXTS)
    ]


def _other_cases() -> list[Case]:
    return [
        task.make(case_source(name, 0, index, "train"), OTHER_TEXT_LENGTH, len)
        for name, task in TASKS.items()
        for index in range(NUM_OTHER_TEXTS)
    ]


class _LayerInput:
    """The second layer's input for a case and its answer."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, case: Case) -> None:
        ids = torch.tensor(tokenizer.encode(case.prompt + case.answer))
        vocabulary = tokenizer.get_vocab()
        entry = vocabulary["entry"]
        colon = vocabulary['":']
        first, second = model.model.layers[:2]
        embedded = model.model.embed_tokens(ids[None])
        positions = torch.arange(len(ids))[None]
        self._rotary = model.model.rotary_emb(embedded, position_ids=positions)
        hidden = first(
            embedded, attention_mask=None, position_embeddings=self._rotary, position_ids=positions
        )
        self._attention = second.self_attn
        self.hidden = second.input_layernorm(hidden)[0]  # [token, hidden]
        # The indices of the tokens that are the records' numbers in the answer.
        self.numbers = ((ids[:-2] == entry) & (ids[1:-1] == colon)).nonzero()[:, 0] + 2

    def products(self) -> torch.Tensor:
        """Return each number's mean product with the queries before the later numbers [kv_head, number]."""
        queries, keys = (
            projection(self.hidden)[None].unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for projection in (self._attention.q_proj, self._attention.k_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *self._rotary)
        products = (
            queries[0, ::GROUP, self.numbers[1:] - 1]
            @ keys[0][:, self.numbers[:-1]].mT
            * self._attention.scaling
        )
        later = torch.ones(NUM_NUMBERS, NUM_NUMBERS).tril()  # [later number, number]
        mean: torch.Tensor = (products * later).sum(1) / later.sum(0)
        return mean
