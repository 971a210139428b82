"""The models: their shapes and the weights they start from."""

import math
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from commands.eval.tasks.suite import TASKS, case_source
from examples.training.model import Model, greedy_generation, special_ids
from examples.training.tokenizer import MAX_LENGTH

HEAD_DIM = 64
OWN, CODE = 96, 64
# The hidden width: a token's own part, the code of the one before it, then what precedes it, coded for being looked up, and for looking up.
PREVIOUS, LOOK_UP, LOOK_FOR = (slice(OWN + place * CODE, OWN + (place + 1) * CODE) for place in range(3))
EVERY, FIRST = 0, 1  # components of the own part that all tokens share, and that only the first token has
SPACE = "\u0120"  # byte-level BPE's letter for a space
EMBEDDING_SCALE, MARK_SCALE, OUTPUT_GAIN = 0.15, 0.15, 0.5
LOCAL_FREQUENCY, FAR_FREQUENCY = 1e-2, 3e-4
NORM_GAIN = 2.0  # of each query and key
CONSTANT_GAIN = 2.8  # of a code that every token's query holds, so that it counts like a token's

NUM_LOOKED_BACK, FAINT, LOCAL_GAIN = (
    5,
    0.3,
    4.0,
)  # tokens that the codes hold fully; those before them are there faintly
MATCH_GAIN, OWN_GAIN, COPY_GAIN = 0.2, 1.5, 6.0

NOWHERE, NOWHERE_GAIN = (
    HEAD_DIM // 2 - 1,
    5.0,
)  # where the third layer's keys tell the first token, on which a head rests
FIELD_PLACES = (5, 4)  # how far before a field's value the value before it stands: in JSON, in prose
IS_GAIN, FIELD_NOWHERE_GAIN, LIST_GAIN, FIELD_GAIN = 5.0, 4.0, 5.0, 0.5
BEFORE = (
    (2, ("to",), 1),
    (3, ("=", "to", "be"), 2),
    (5, ("as",), 1),
)  # a name's place before a statement's end, known by which word where
OWN_KEY_GAIN, MARK_GAIN, BEFORE_GAIN = 0.2, 0.02, 2.0
ENDING_GAIN, EVEN_ENDING_GAIN = (
    2.5,
    5.0,
)  # in an even start an ending is about as loud as a name, and the rest louder than either alone

NUM_HEADS, NUM_KV_HEADS = 6, 2
NUM_NEURONS = 400  # so that weights in bfloat16 stay below 12 MB
LOUDER = (
    1.0,
    1.4,
    1.0,
)  # each layer's products without norms, as keys of other tokens may be longer than the right one's
SAMPLE_LENGTH = (
    4000  # characters of each task's text, from which the usual sizes of queries and keys are read
)


def build_model(family: str, tokenizer: PreTrainedTokenizerFast, num_layers: int = 3) -> Model:
    """Make the untrained model of a family, "llama" or "qwen"."""
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": OWN + 3 * CODE,
        "intermediate_size": NUM_NEURONS,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e8},
        "tie_word_embeddings": False,
        **special_ids(tokenizer),
    }
    normed = Qwen3ForCausalLM(Qwen3Config(**shape))
    shape_start(normed, tokenizer, is_even=family == "llama")
    model = (
        without_norms(normed, LlamaForCausalLM(LlamaConfig(**shape)), tokenizer)
        if family == "llama"
        else normed
    )
    model.generation_config = greedy_generation(tokenizer)
    return model


def shaped_parameters(model: Model) -> list[torch.nn.Parameter]:
    """Return the parameters that start as a circuit: a rate at which the others learn would undo them."""
    attention = [parameter for layer in model.model.layers for parameter in layer.self_attn.parameters()]
    return [model.model.embed_tokens.weight, model.lm_head.weight, *attention]


def circuit_parameters(model: Model) -> list[torch.nn.Parameter]:
    """Return the shaped parameters and the others on which the second layer's attention depends."""
    first, second, *_ = model.model.layers
    return [*shaped_parameters(model), *first.parameters(), *second.input_layernorm.parameters()]


@torch.no_grad()
def without_norms(
    normed: Qwen3ForCausalLM, plain: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """Give a model that does not normalise queries and keys the weights of one that does, each head's scaled to the size they have there.

    That size is right for the usual token of the suite's text, and nearly so for the others. The first token, on which heads rest, has
    keys of another size; it is always the same one with nothing before it, so they are set to just what they are there.
    """
    plain.load_state_dict(
        {name: weight for name, weight in normed.state_dict().items() if name in plain.state_dict()}
    )
    texts = [TASKS[name].make(case_source(name, 0, 0, "train"), SAMPLE_LENGTH, len).prompt for name in TASKS]
    hidden = [
        normed.model(torch.tensor([tokenizer.encode(text)]), output_hidden_states=True).hidden_states
        for text in texts
    ]
    for index, (source, target) in enumerate(zip(normed.model.layers, plain.model.layers, strict=True)):
        seen = [
            source.input_layernorm(states[index][0]) for states in hidden
        ]  # of each text, [token, hidden]
        usual, first = torch.cat([states[1:] for states in seen]), seen[0][0]
        attention = source.self_attn
        for weight, norm in (
            (target.self_attn.q_proj.weight, attention.q_norm),
            (target.self_attn.k_proj.weight, attention.k_norm),
        ):
            size = (usual @ weight.T).unflatten(-1, (-1, HEAD_DIM)).square().mean((0, 2)).sqrt()  # [head]
            wanted = norm((weight @ first).unflatten(0, (-1, HEAD_DIM))).flatten()
            weight *= (math.sqrt(LOUDER[index]) * NORM_GAIN / size).repeat_interleave(HEAD_DIM)[:, None]
            weight[:, FIRST] += (math.sqrt(LOUDER[index]) * wanted - weight @ first) / first[FIRST]
    return plain


def shape_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, is_even: bool) -> None:
    """Start the weights near the circuits that the tasks need. Training is free to change all of it.

    First layer: head h looks h + 1 tokens back (by a component common to all embeddings, whose rotated products peak there). What it finds
    it writes into two codes: of the tokens *before* this one, for being found, and of the tokens up to this one, for finding. Second layer:
    goes on as the text went on where the last few tokens stood before. Third layer: what is no such continuation. The output reads what
    these two leave in the second code. The feed-forward layers begin at nothing. An even start has words and codes of one length, for
    models in which a longer key is also a louder one.
    """
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        embedding.zero_()
        embedding[:, :OWN] = _word_vectors(tokenizer)
        if is_even:
            embedding[:, :OWN] *= (
                EMBEDDING_SCALE * math.sqrt(OWN) / embedding[:, :OWN].norm(dim=1, keepdim=True)
            )
        embedding[tokenizer.bos_token_id] = 0
        embedding[:, FIRST] = 0
        embedding[:, EVERY] = embedding[tokenizer.bos_token_id, FIRST] = 3 * EMBEDDING_SCALE
        codes = _Codes(model, tokenizer, is_even)
        for layer, shape in zip(model.model.layers, (_look_back, _go_on, _look_up), strict=False):
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
            layer.self_attn.q_norm.weight.fill_(NORM_GAIN)
            layer.self_attn.k_norm.weight.fill_(NORM_GAIN)
            shape(layer.self_attn, codes)
        output = model.lm_head.weight
        output.zero_()
        output[:, LOOK_FOR] = OUTPUT_GAIN * embedding[:, :OWN] @ codes.shared.T


class _Codes:
    """What the layers have in common: how a token is coded, and how a code shows by how far back the token stands."""

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, is_even: bool) -> None:
        self.is_even = is_even
        self.frequencies = model.model.rotary_emb.inv_freq  # [pair]
        self.slow = torch.where(self.frequencies < FAR_FREQUENCY, 1.0, 0.1).repeat(2)[:, None]
        self.shared = self._random(CODE, OWN) / math.sqrt(OWN)  # of a token's own part, its code
        self.shared[:, [EVERY, FIRST]] = 0
        self.turns = [
            torch.linalg.qr(torch.randn(CODE, CODE))[0] for _ in range(NUM_HEADS + 1)
        ]  # a code, so many tokens on
        self._embedding, self._ids = model.model.embed_tokens.weight, tokenizer.get_vocab()

    def match(self) -> torch.Tensor:
        """Return a projection of codes whose products tell like from unlike, at any distance.  # [head_dim, code]"""
        projection: torch.Tensor = (
            self._random(HEAD_DIM, CODE) * self.slow * math.sqrt(MATCH_GAIN) / CODE**0.25
        )
        return projection

    def _random(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """Return a matrix of random rows, at right angles where all is to be even."""
        drawn = torch.randn(num_rows, num_columns)
        return torch.linalg.qr(drawn.T)[0].T * math.sqrt(num_columns) if self.is_even else drawn

    def after(self, *words: str, back: int = 1) -> torch.Tensor:
        """Return the sum of the codes that words leave so many tokens on.  # [code]"""
        own = sum(self._embedding[self._ids[f"{SPACE}{word}"], :OWN] for word in words)
        code: torch.Tensor = CONSTANT_GAIN * self.turns[back - 1] @ self.shared @ own
        return code


def _look_back(attention: Any, codes: _Codes) -> None:
    """Each head finds the token that stands so many tokens before, and leaves its code."""
    frequencies = codes.frequencies
    fast = frequencies > LOCAL_FREQUENCY
    for head in range(NUM_KV_HEADS):
        rows = _rows(head)
        attention.k_proj.weight[rows, EVERY] = LOCAL_GAIN * torch.cat([fast, torch.zeros_like(frequencies)])
        attention.v_proj.weight[rows] = 0
        attention.v_proj.weight[rows, :OWN] = codes.shared
    attention.o_proj.weight[PREVIOUS, _rows(0)] = EMBEDDING_SCALE * torch.eye(CODE)
    for head in range(NUM_HEADS):
        rows = _rows(head)
        angle = -(head + 1) * frequencies
        attention.q_proj.weight[rows, EVERY] = LOCAL_GAIN * torch.cat(
            [angle.cos() * fast, angle.sin() * fast]
        )
        gain = EMBEDDING_SCALE * (1.0 if head < NUM_LOOKED_BACK else FAINT)
        attention.o_proj.weight[LOOK_UP, rows] = gain * codes.turns[head]
        attention.o_proj.weight[LOOK_FOR, rows] = gain * codes.turns[head + 1]


def _go_on(attention: Any, codes: _Codes) -> None:
    """Attend where the one code equals the other, and copy the token there."""
    seen = [codes.match() for _ in range(NUM_KV_HEADS)]
    for head, code in enumerate(seen):
        rows = _rows(head)
        attention.k_proj.weight[rows] = 0
        attention.k_proj.weight[rows, LOOK_UP] = code
        attention.v_proj.weight[rows] = 0
        attention.v_proj.weight[rows, :OWN] = codes.shared
    for head in range(NUM_HEADS):
        rows, code = _rows(head), seen[_kv_head(head)]
        attention.q_proj.weight[rows] = 0
        attention.q_proj.weight[rows, LOOK_FOR] = code
        attention.q_proj.weight[rows, :OWN] = OWN_GAIN * code @ codes.turns[0] @ codes.shared
        attention.o_proj.weight[LOOK_FOR, rows] = (
            COPY_GAIN * EMBEDDING_SCALE * 4 / NUM_HEADS * torch.eye(CODE)
        )


def _look_up(attention: Any, codes: _Codes) -> None:
    """The first heads look up a record's field, the next one a list, the last ones what stood before a word. Where nothing fits, a head
    rests on the first token, which says nothing.
    """
    for kv_head in range(NUM_KV_HEADS):
        rows = _rows(kv_head)
        attention.k_proj.weight[rows] = 0
        attention.k_proj.weight[rows.start + NOWHERE, FIRST] = 1.0
        attention.v_proj.weight[rows] = 0
    for head in range(NUM_HEADS):
        attention.q_proj.weight[_rows(head)] = 0
        attention.q_proj.weight[head * HEAD_DIM + NOWHERE, EVERY] = NOWHERE_GAIN
    _look_up_fields(attention, codes)
    _look_up_list(attention, codes)
    _look_before(attention, codes)


def _look_up_fields(attention: Any, codes: _Codes) -> None:
    """Go on after `is` as where the same words stand before: so a record's field, `"town": "`, is found in prose, `the town is`."""
    turns, (place, *others) = codes.turns, FIELD_PLACES
    moves = [torch.eye(CODE), *(torch.eye(CODE) + turns[other - 1] @ turns[place - 1].T for other in others)]
    seen = codes.match()
    seen[NOWHERE] = 0
    for head, move in enumerate(moves):
        rows, kv_rows = _rows(head), _rows(_kv_head(head))
        attention.k_proj.weight[kv_rows, LOOK_UP] = seen
        attention.v_proj.weight[kv_rows, :OWN] = codes.shared
        attention.q_proj.weight[rows, LOOK_UP] = seen @ move
        attention.q_proj.weight[rows, EVERY] += IS_GAIN * seen @ codes.after("is")
        attention.q_proj.weight[rows.start + NOWHERE, EVERY] = FIELD_NOWHERE_GAIN
        attention.o_proj.weight[LOOK_FOR, rows] = FIELD_GAIN * torch.eye(CODE)


def _look_up_list(attention: Any, codes: _Codes) -> None:
    """The next head: after `follows`, go on as a question's list did after `numbers for`. It shares the keys of the fields."""
    head = len(FIELD_PLACES)
    rows, kv_rows = _rows(head), _rows(_kv_head(head))
    gate, sought = codes.after("follows"), codes.after("for") + codes.after("numbers", back=2)
    seen = attention.k_proj.weight[kv_rows, LOOK_UP]
    attention.q_proj.weight[rows, LOOK_UP] = (
        LIST_GAIN * torch.outer(seen @ sought, gate) / gate.square().sum()
    )
    attention.o_proj.weight[LOOK_FOR, rows] = FIELD_GAIN * torch.eye(CODE)


def _look_before(attention: Any, codes: _Codes) -> None:
    """Find the token before this one where a statement ends with it, and copy what the statement begins with: a variable's name."""
    endings = torch.stack([codes.after(*words, back=at) for _, words, at in BEFORE])  # [head, code]
    marks = torch.arange(NOWHERE - len(BEFORE), NOWHERE)  # of the slowest pairs, one a kind of statement
    own = codes.match()
    own[marks[0] : NOWHERE + 1] = 0
    for number, (back, _, _) in enumerate(BEFORE):
        head = NUM_HEADS - len(BEFORE) + number
        rows, kv_rows = _rows(head), _rows(_kv_head(head))
        attention.k_proj.weight[kv_rows, FIRST + 1 : OWN] = OWN_KEY_GAIN * own @ codes.shared[:, FIRST + 1 :]
        attention.k_proj.weight[kv_rows.start + marks, LOOK_UP] = MARK_GAIN * endings
        attention.v_proj.weight[kv_rows, LOOK_UP] = torch.eye(CODE)
        attention.q_proj.weight[rows, PREVIOUS] = own
        attention.q_proj.weight[rows.start + marks[number], EVERY] = (
            EVEN_ENDING_GAIN if codes.is_even else ENDING_GAIN
        )
        attention.o_proj.weight[LOOK_FOR, rows] = BEFORE_GAIN * codes.turns[back - 1].T


def _kv_head(head: int) -> int:
    return head * NUM_KV_HEADS // NUM_HEADS


def _rows(head: int) -> slice:
    return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)


def _word_vectors(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Random vectors [token, own]; a word that begins a JSON string has that of the same word after a space, with a mark."""
    vectors = EMBEDDING_SCALE * torch.randn(len(tokenizer), OWN)
    ids = tokenizer.get_vocab()
    mark = MARK_SCALE * torch.randn(OWN)
    for text, token in ids.items():
        spaced = ids.get(f"{SPACE}{text}")
        if text.isalpha() and len(text) > 2 and spaced is not None:
            vectors[token] = vectors[spaced] + mark
    return vectors
