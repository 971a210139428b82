"""A change of the Llama's second layer between two stages of its training: its heads are told apart, and it sees the highest number.

Works on any weights of `build_model("llama", …)`, trained or not: what is to be changed by how much is read from the suite's texts.
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
LOUDER_BY = (
    3.0  # the product with a number over that with the one before it, which has then 5 % of the attention
)
NUM_RECORD_TEXTS, NUM_OTHER_TEXTS = 4, 2  # the latter of each task
RECORD_TEXT_LENGTH, OTHER_TEXT_LENGTH = 3000, 4000  # characters
RIDGE = 1e-3
GROUP = NUM_HEADS // NUM_KV_HEADS


@torch.no_grad()
def change_second_layer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Let the second layer's keys grow louder from number to number, and tell its heads apart."""
    _count(model, tokenizer)
    _tell_apart(model)


def _tell_apart(model: LlamaForCausalLM) -> None:
    """Add noise to the queries: heads of one key-value head start the same (`shape_start`), and training alone would keep them so."""
    weight = model.model.layers[1].self_attn.q_proj.weight
    size = weight.unflatten(0, (NUM_HEADS, -1)).square().mean((1, 2)).sqrt().repeat_interleave(HEAD_DIM)
    weight += (
        QUERY_NOISE * size[:, None] * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    )


def _count(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Make the keys of the numbers from 3 on louder where a record's number is looked for, so that of those written the last is seen.

    Of the changes that do this, it is the one that changes the products elsewhere least. Needs heads that are not told apart yet.
    """
    attention = model.model.layers[1].self_attn
    records = [_Read(model, tokenizer, case) for case in _records()]
    hidden = torch.cat(
        [read.hidden for read in [*records, *(_Read(model, tokenizer, case) for case in _others())]]
    )
    numbers = _telling(
        torch.stack([read.hidden[read.numbers[:-1]] for read in records]).mean(0), hidden
    )  # [number, hidden]
    lacking = _lacking(torch.stack([read.products() for read in records]).mean(0))
    slow = (model.model.rotary_emb.inv_freq < FAR_FREQUENCY).repeat(2)  # what hardly turns with the distance
    before = torch.cat(
        [read.hidden[read.numbers[1:] - 1] for read in records]
    )  # where numbers are looked for
    for head in range(NUM_KV_HEADS):
        to_query = attention.q_proj.weight[GROUP * head * HEAD_DIM :][:HEAD_DIM][slow]
        query = _telling((before @ to_query.T).mean(0, keepdim=True), hidden @ to_query.T)[0]
        rows = head * HEAD_DIM + slow.nonzero()[:, 0]
        attention.k_proj.weight[rows] += torch.outer(query, lacking[head] @ numbers) / attention.scaling


def _lacking(products: torch.Tensor) -> torch.Tensor:
    """Return what products with the numbers lack to go up evenly from 2 on.  # [kv_head, number]"""
    wanted = products[:, 1:2] + LOUDER_BY * (torch.arange(NUM_NUMBERS) - 1)
    return torch.where(torch.arange(NUM_NUMBERS) < 2, 0.0, wanted - products)


def _telling(wanted: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return for each wanted vector one with product 1 with it, 0 with the other wanted ones, little with those seen.  # [wanted, dim]"""
    moment = seen.T @ seen / len(seen)
    rare = torch.linalg.inv(moment + RIDGE * moment.diagonal().mean() * torch.eye(len(moment)))
    told: torch.Tensor = torch.linalg.solve(wanted @ rare @ wanted.T, wanted @ rare)
    return told


def _records() -> list[Case]:
    task = ExtractionTask(num_records=NUM_NUMBERS + 1)
    return [
        task.make(case_source(task.name, 0, index, "train"), RECORD_TEXT_LENGTH, len)
        for index in range(NUM_RECORD_TEXTS)
    ]


def _others() -> list[Case]:
    indices = range(NUM_OTHER_TEXTS)
    return [
        task.make(case_source(name, 0, index, "train"), OTHER_TEXT_LENGTH, len)
        for name, task in TASKS.items()
        for index in indices
    ]


class _Read:
    """What the second layer makes of a case and its answer."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, case: Case) -> None:
        ids = torch.tensor(tokenizer.encode(case.prompt + case.answer))
        vocabulary = tokenizer.get_vocab()
        entry, colon = vocabulary["entry"], vocabulary['":']
        first, second = model.model.layers[:2]
        embedded = model.model.embed_tokens(ids[None])
        positions = torch.arange(len(ids))[None]
        self._rotary = model.model.rotary_emb(embedded, position_ids=positions)
        hidden = first(
            embedded, attention_mask=None, position_embeddings=self._rotary, position_ids=positions
        )
        self._attention = second.self_attn
        self.hidden = second.input_layernorm(hidden)[0]  # the layer's input, [token, hidden]
        self.numbers = ((ids[:-2] == entry) & (ids[1:-1] == colon)).nonzero()[
            :, 0
        ] + 2  # where the answer's records have theirs

    def products(self) -> torch.Tensor:
        """Return each number's product with the queries of where the later ones are looked for, their mean.  # [kv_head, number]"""
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
        later = torch.ones(NUM_NUMBERS, NUM_NUMBERS).tril()  # [looked for, number]
        mean: torch.Tensor = (products * later).sum(1) / later.sum(0)
        return mean
