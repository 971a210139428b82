"""The evaluation models' shapes, and the weights they start from."""

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

# The hidden width has four parts: the token's own vector, and three codes.
OWN = 96
CODE = 64
PREVIOUS = slice(OWN, OWN + CODE)  # the code of the token before
LOOK_UP = slice(OWN + CODE, OWN + 2 * CODE)  # codes of the tokens before this one, which keys hold
LOOK_FOR = slice(OWN + 2 * CODE, OWN + 3 * CODE)  # codes of the tokens up to this one, which queries hold
EVERY = 0  # the component of the own part that all tokens share
FIRST = 1  # the component that only the first token has

SPACE = "\u0120"  # byte-level BPE's letter for a space
EMBEDDING_SCALE = 0.15
MARK_SCALE = 0.15
OUTPUT_GAIN = 0.5
LOCAL_FREQUENCY = 1e-2  # rotary pairs above it resolve single tokens
FAR_FREQUENCY = 3e-4  # rotary pairs below it hardly turn over the longest distance
NORM_GAIN = 2.0  # of each query and key
CONSTANT_GAIN = 2.8  # of a code that every token's query holds, so that it counts like a token's

# First layer.
NUM_LOOKED_BACK = 5  # tokens that the codes hold fully
FAINT = 0.3  # the share with which the codes hold the token before these
LOCAL_GAIN = 4.0

# Second layer.
MATCH_GAIN = 0.2
OWN_GAIN = 1.5
COPY_GAIN = 6.0

# Third layer.
NOWHERE = HEAD_DIM // 2 - 1  # the key component that marks the first token, on which a head rests
NOWHERE_GAIN = 5.0
FIELD_DISTANCES = (5, 4)  # tokens from a field's value back to the value before it: in JSON, in prose
FIELD_NOWHERE_GAIN = 4.0
FIELD_GAIN = 0.5
IS_GAIN = 5.0
LIST_GAIN = 5.0
# The endings of statements that begin with a variable's name: the distance from the ending back to the name,
# the words that mark the ending, and the distance back to these words.
ENDINGS = ((2, ("to",), 1), (3, ("=", "to", "be"), 2), (5, ("as",), 1))
OWN_KEY_GAIN = 0.2
MARK_GAIN = 0.02
BEFORE_GAIN = 2.0
ENDING_GAIN = 2.5
# In an even start a marked ending scores about as high as a name, and both together score above the rest.
EVEN_ENDING_GAIN = 5.0

NUM_HEADS = 6
NUM_KV_HEADS = 2
NUM_NEURONS = 400  # keeps weights in bfloat16 below 12 MB
# Factors of each layer's products without norms, where other keys may be longer than the right one.
PRODUCT_GAINS = (1.0, 1.4, 1.0)
SAMPLE_LENGTH = 4000  # characters of each task's text; it gives the usual sizes of queries and keys


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
    """Return the parameters that start as a circuit. The learning rate of the others would destroy it."""
    attention = [parameter for layer in model.model.layers for parameter in layer.self_attn.parameters()]
    return [model.model.embed_tokens.weight, model.lm_head.weight, *attention]


def circuit_parameters(model: Model) -> list[torch.nn.Parameter]:
    """Return the shaped parameters, and those that the second layer's attention depends on."""
    first, second, *_ = model.model.layers
    return [*shaped_parameters(model), *first.parameters(), *second.input_layernorm.parameters()]


@torch.no_grad()
def without_norms(
    normed: Qwen3ForCausalLM, plain: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """Copy the weights of a model with query and key norms into one without, and return the latter.

    Each head's weights are scaled to the size that the norms give to the usual token of the suite's text. For
    the other tokens the size is nearly right. The first token, on which heads rest, has keys of another size.
    It is always the same token with nothing before it, so its queries and keys are set exactly.
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
        # The layer's input for each text, [token, hidden].
        inputs = [source.input_layernorm(states[index][0]) for states in hidden]
        usual = torch.cat([states[1:] for states in inputs])
        first = inputs[0][0]
        gain = math.sqrt(PRODUCT_GAINS[index])
        attention = source.self_attn
        for weight, norm in (
            (target.self_attn.q_proj.weight, attention.q_norm),
            (target.self_attn.k_proj.weight, attention.k_norm),
        ):
            size = (usual @ weight.T).unflatten(-1, (-1, HEAD_DIM)).square().mean((0, 2)).sqrt()  # [head]
            normed_first = norm((weight @ first).unflatten(0, (-1, HEAD_DIM))).flatten()
            weight *= (gain * NORM_GAIN / size).repeat_interleave(HEAD_DIM)[:, None]
            # Only the first token has the component FIRST, so this column corrects it alone.
            weight[:, FIRST] += (gain * normed_first - weight @ first) / first[FIRST]
    return plain


def shape_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, is_even: bool) -> None:
    """Start the weights near the circuits that the tasks need. Training is free to change all of them.

    First layer: head h attends h + 1 tokens back, by a component common to all embeddings whose rotated
    products peak there. It writes the token's code into LOOK_UP and LOOK_FOR. Second layer: induction heads
    continue the text as it continued after an earlier match of the last few tokens. Third layer: lookups
    that are no such continuation. The output reads LOOK_FOR. The feed-forward layers start at zero.

    An even start has words and codes of one length, for models without norms, where a longer key has a
    larger product.
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
        for layer, shape in zip(model.model.layers, (_look_back, _continue_text, _look_up), strict=False):
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
            layer.self_attn.q_norm.weight.fill_(NORM_GAIN)
            layer.self_attn.k_norm.weight.fill_(NORM_GAIN)
            shape(layer.self_attn, codes)
        output = model.lm_head.weight
        output.zero_()
        output[:, LOOK_FOR] = OUTPUT_GAIN * embedding[:, :OWN] @ codes.shared.T


class _Codes:
    """How a token is coded. A rotation of its code shows how far back it is."""

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, is_even: bool) -> None:
        self.is_even = is_even
        self.frequencies = model.model.rotary_emb.inv_freq  # [pair]
        self.slow = torch.where(self.frequencies < FAR_FREQUENCY, 1.0, 0.1).repeat(2)[:, None]
        self.shared = self._random(CODE, OWN) / math.sqrt(OWN)  # maps a token's own part to its code
        self.shared[:, [EVERY, FIRST]] = 0
        # The rotation at index i applies to the code of the token i + 1 back.
        self.rotations = [torch.linalg.qr(torch.randn(CODE, CODE))[0] for _ in range(NUM_HEADS + 1)]
        self._embedding = model.model.embed_tokens.weight
        self._ids = tokenizer.get_vocab()

    def match(self) -> torch.Tensor:
        """Return a projection whose products are large for equal codes at any distance [head_dim, code]."""
        projection: torch.Tensor = (
            self._random(HEAD_DIM, CODE) * self.slow * math.sqrt(MATCH_GAIN) / CODE**0.25
        )
        return projection

    def _random(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """Return a random matrix, whose rows are orthogonal in an even start."""
        drawn = torch.randn(num_rows, num_columns)
        return torch.linalg.qr(drawn.T)[0].T * math.sqrt(num_columns) if self.is_even else drawn

    def after(self, *words: str, back: int = 1) -> torch.Tensor:
        """Return the sum of the codes that words leave `back` tokens later [code]."""
        own = sum(self._embedding[self._ids[f"{SPACE}{word}"], :OWN] for word in words)
        code: torch.Tensor = CONSTANT_GAIN * self.rotations[back - 1] @ self.shared @ own
        return code


def _look_back(attention: Any, codes: _Codes) -> None:
    """Let head h attend to the token h + 1 back, and write its code."""
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
        attention.o_proj.weight[LOOK_UP, rows] = gain * codes.rotations[head]
        attention.o_proj.weight[LOOK_FOR, rows] = gain * codes.rotations[head + 1]


def _continue_text(attention: Any, codes: _Codes) -> None:
    """Attend where LOOK_UP equals this token's LOOK_FOR, and copy the token there."""
    matches = [codes.match() for _ in range(NUM_KV_HEADS)]
    for head, code in enumerate(matches):
        rows = _rows(head)
        attention.k_proj.weight[rows] = 0
        attention.k_proj.weight[rows, LOOK_UP] = code
        attention.v_proj.weight[rows] = 0
        attention.v_proj.weight[rows, :OWN] = codes.shared
    for head in range(NUM_HEADS):
        rows = _rows(head)
        code = matches[_kv_head(head)]
        attention.q_proj.weight[rows] = 0
        attention.q_proj.weight[rows, LOOK_FOR] = code
        attention.q_proj.weight[rows, :OWN] = OWN_GAIN * code @ codes.rotations[0] @ codes.shared
        attention.o_proj.weight[LOOK_FOR, rows] = (
            COPY_GAIN * EMBEDDING_SCALE * 4 / NUM_HEADS * torch.eye(CODE)
        )


def _look_up(attention: Any, codes: _Codes) -> None:
    """Let the first heads look up a record's field, the next a list, and the last the name before a word.

    A head without a match rests on the first token, whose value is zero.
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
    """Continue after `is` where the same words precede it, so that `"town": "` finds `the town is` in prose.

    The second head also moves the code of the value before from its distance in JSON to that in prose.
    """
    in_json, in_prose = FIELD_DISTANCES
    rotations = codes.rotations
    to_prose = torch.eye(CODE) + rotations[in_prose - 1] @ rotations[in_json - 1].T
    moves = [torch.eye(CODE), to_prose]
    match = codes.match()
    match[NOWHERE] = 0
    for head, move in enumerate(moves):
        rows = _rows(head)
        kv_rows = _rows(_kv_head(head))
        attention.k_proj.weight[kv_rows, LOOK_UP] = match
        attention.v_proj.weight[kv_rows, :OWN] = codes.shared
        attention.q_proj.weight[rows, LOOK_UP] = match @ move
        attention.q_proj.weight[rows, EVERY] += IS_GAIN * match @ codes.after("is")
        attention.q_proj.weight[rows.start + NOWHERE, EVERY] = FIELD_NOWHERE_GAIN
        attention.o_proj.weight[LOOK_FOR, rows] = FIELD_GAIN * torch.eye(CODE)


def _look_up_list(attention: Any, codes: _Codes) -> None:
    """Continue after `follows` like a question's list after `numbers for`. Shares the fields' keys."""
    head = len(FIELD_DISTANCES)
    rows = _rows(head)
    kv_rows = _rows(_kv_head(head))
    gate = codes.after("follows")
    sought = codes.after("for") + codes.after("numbers", back=2)
    match = attention.k_proj.weight[kv_rows, LOOK_UP]
    attention.q_proj.weight[rows, LOOK_UP] = (
        LIST_GAIN * torch.outer(match @ sought, gate) / gate.square().sum()
    )
    attention.o_proj.weight[LOOK_FOR, rows] = FIELD_GAIN * torch.eye(CODE)


def _look_before(attention: Any, codes: _Codes) -> None:
    """Find the statement that the token before this one ends, and copy the name at its start."""
    endings = torch.stack([codes.after(*words, back=back) for _, words, back in ENDINGS])  # [head, code]
    # Components of the slowest rotary pairs, which hardly turn: one for each kind of statement.
    marks = torch.arange(NOWHERE - len(ENDINGS), NOWHERE)
    own = codes.match()
    own[marks[0] : NOWHERE + 1] = 0
    for index, (back, _, _) in enumerate(ENDINGS):
        head = NUM_HEADS - len(ENDINGS) + index
        rows = _rows(head)
        kv_rows = _rows(_kv_head(head))
        attention.k_proj.weight[kv_rows, FIRST + 1 : OWN] = OWN_KEY_GAIN * own @ codes.shared[:, FIRST + 1 :]
        attention.k_proj.weight[kv_rows.start + marks, LOOK_UP] = MARK_GAIN * endings
        attention.v_proj.weight[kv_rows, LOOK_UP] = torch.eye(CODE)
        attention.q_proj.weight[rows, PREVIOUS] = own
        attention.q_proj.weight[rows.start + marks[index], EVERY] = (
            EVEN_ENDING_GAIN if codes.is_even else ENDING_GAIN
        )
        attention.o_proj.weight[LOOK_FOR, rows] = BEFORE_GAIN * codes.rotations[back - 1].T


def _kv_head(head: int) -> int:
    return head * NUM_KV_HEADS // NUM_HEADS


def _rows(head: int) -> slice:
    return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)


def _word_vectors(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return random vectors [token, own].

    A word without a space, which begins a JSON string, has the vector of the word after a space, plus a mark.
    """
    vectors = EMBEDDING_SCALE * torch.randn(len(tokenizer), OWN)
    ids = tokenizer.get_vocab()
    mark = MARK_SCALE * torch.randn(OWN)
    for text, token in ids.items():
        spaced = ids.get(f"{SPACE}{text}")
        if text.isalpha() and len(text) > 2 and spaced is not None:
            vectors[token] = vectors[spaced] + mark
    return vectors
