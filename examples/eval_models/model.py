"""The models: their shapes and the weights they start from."""

import math

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.eval_models.tokenizer import MAX_LENGTH

HEAD_DIM = 64
OWN, CODE = 160, 64  # the hidden width: the token's own part, then what precedes it, coded for being looked up, and for looking up
NUM_LOOKED_BACK, FAINT = 4, 0.3  # tokens that the codes hold fully; those before them are there faintly
LOCAL_FREQUENCY, LOCAL_GAIN = 1e-2, 4.0
FAR_FREQUENCY = 3e-4
EMBEDDING_SCALE, MARK_SCALE = 0.15, 0.15
MATCH_GAIN, COPY_GAIN, OUTPUT_GAIN = 0.2, 6.0, 0.5
OWN_GAIN = 1.5
NORM_GAIN = 2.0  # of each query and key, in families that normalise them

NUM_HEADS = {"llama": (6, 3), "qwen": (6, 2)}  # of queries, of keys and values
NUM_NEURONS = {"llama": 512, "qwen": 400}  # so that weights in bfloat16 stay below 12 MB

Model = LlamaForCausalLM | Qwen3ForCausalLM


def build_model(family: str, tokenizer: PreTrainedTokenizerFast, num_layers: int = 3) -> Model:
    """Make the untrained model of a family, "llama" or "qwen"."""
    num_heads, num_kv_heads = NUM_HEADS[family]
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": OWN + 2 * CODE,
        "intermediate_size": NUM_NEURONS[family],
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e8},
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model: Model = LlamaForCausalLM(LlamaConfig(**shape)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    shape_start(model, tokenizer, num_heads, num_kv_heads)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    return model


def shaped_parameters(model: Model) -> list[torch.nn.Parameter]:
    """Return the parameters that start as a circuit: a rate at which the others learn would undo them."""
    attention = [parameter for layer in model.model.layers[:2] for parameter in layer.self_attn.parameters()]
    return [model.model.embed_tokens.weight, model.lm_head.weight, *attention]


def shape_start(model: Model, tokenizer: PreTrainedTokenizerFast, num_heads: int, num_kv_heads: int) -> None:
    """Start the weights near the circuit that continues text as it went on where the last few tokens stood before.

    First layer: head h looks h + 1 tokens back (by a component common to all embeddings, whose rotated products peak there). What it finds
    it writes into two codes: of the tokens *before* this one, for being found, and of the tokens up to this one, for finding. Second layer:
    attends where the one code equals the other, by slow rotary pairs, which match at any distance, and adds that token's own part to the
    second code, from which the output reads. Whatever else there is begins at nothing. Training is free to change all of it.
    """
    frequencies = model.model.rotary_emb.inv_freq  # [pair]
    look_up, look_for = slice(OWN, OWN + CODE), slice(OWN + CODE, OWN + 2 * CODE)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.zero_()
        embedding[:, :OWN] = _word_vectors(tokenizer)
        embedding[:, 0] = 3 * EMBEDDING_SCALE
        shared = torch.randn(CODE, OWN) / math.sqrt(OWN)
        shared[:, 0] = 0
        turns = [torch.linalg.qr(torch.randn(CODE, CODE))[0] for _ in range(num_heads + 1)]

        first = model.model.layers[0].self_attn
        fast = frequencies > LOCAL_FREQUENCY
        first.o_proj.weight.zero_()
        for head in range(num_kv_heads):
            rows = _rows(head)
            first.k_proj.weight[rows, 0] = LOCAL_GAIN * torch.cat([fast, torch.zeros_like(frequencies)])
            first.v_proj.weight[rows] = 0
            first.v_proj.weight[rows, :OWN] = shared
        for head in range(num_heads):
            rows = _rows(head)
            angle = -(head + 1) * frequencies
            first.q_proj.weight[rows, 0] = LOCAL_GAIN * torch.cat([angle.cos() * fast, angle.sin() * fast])
            gain = EMBEDDING_SCALE * (1.0 if head < NUM_LOOKED_BACK else FAINT)
            first.o_proj.weight[look_up, rows] = gain * turns[head]
            first.o_proj.weight[look_for, rows] = gain * turns[head + 1]

        second = model.model.layers[1].self_attn
        slow = torch.where(frequencies < FAR_FREQUENCY, 1.0, 0.1).repeat(2)
        seen = [torch.randn(HEAD_DIM, CODE) * slow[:, None] * math.sqrt(MATCH_GAIN) / CODE**0.25 for _ in range(num_kv_heads)]
        second.o_proj.weight.zero_()
        for head in range(num_kv_heads):
            rows = _rows(head)
            second.k_proj.weight[rows] = 0
            second.k_proj.weight[rows, look_up] = seen[head]
            second.v_proj.weight[rows] = 0
            second.v_proj.weight[rows, :OWN] = shared
        for head in range(num_heads):
            rows, code = _rows(head), seen[head * num_kv_heads // num_heads]
            second.q_proj.weight[rows] = 0
            second.q_proj.weight[rows, look_for] = code
            second.q_proj.weight[rows, :OWN] = OWN_GAIN * code @ turns[0] @ shared
            second.o_proj.weight[look_for, rows] = COPY_GAIN * EMBEDDING_SCALE * 4 / num_heads * torch.eye(CODE)
        for layer in (first, second):
            for norm in (getattr(layer, "q_norm", None), getattr(layer, "k_norm", None)):
                if norm is not None:
                    norm.weight.fill_(NORM_GAIN)
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
        output = model.lm_head.weight
        output.zero_()
        output[:, look_for] = OUTPUT_GAIN * embedding[:, :OWN] @ shared.T


def _rows(head: int) -> slice:
    return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)


def _word_vectors(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Random vectors [token, own]; a word that begins a JSON string has that of the same word after a space, with a mark."""
    vectors = EMBEDDING_SCALE * torch.randn(len(tokenizer), OWN)
    ids = tokenizer.get_vocab()
    mark = MARK_SCALE * torch.randn(OWN)
    for text, token in ids.items():
        spaced = ids.get(f"\u0120{text}")  # byte-level BPE's letter for a space
        if text.isalpha() and len(text) > 2 and spaced is not None:
            vectors[token] = vectors[spaced] + mark
    return vectors
