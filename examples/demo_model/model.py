"""The demo model's shape and the weights it starts from."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from commands.eval.tasks import words
from examples.training.model import greedy_generation, special_ids
from examples.training.tokenizer import MAX_LENGTH

HEAD_DIM = 64
LOCAL_FREQUENCY = 1e-3
LOCAL_GAIN = 1.7
FAR_FREQUENCY = 1e-2
FAR_GAIN = 5.0
EMBEDDING_SCALE = 0.08
COPY_GAIN = 1.5
OUTPUT_GAIN = 0.5


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make the untrained model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
        **special_ids(tokenizer),
    )
    model = LlamaForCausalLM(config)
    shape_start(model, tokenizer)
    model.generation_config = greedy_generation(tokenizer)
    return model


def shape_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Start the weights near the circuit that the task needs.

    With a random start, training stays long on a plateau where the model only guesses.

    One half of the residual stream starts as the token's own vector, the other as the first layer's output.

    First layer: head h attends h + 1 tokens back and writes that token into the second half. To this end
    every embedding has the same large first component, and the queries and keys made of it have rotated
    products that peak at that distance.

    Second layer: attends to positions with a similar second half, and copies their first half. Queries and
    keys start as one projection, with most weight on the slow rotary pairs, which match at any distance.

    Output: the copied token. An answer's first word has no leading space, and starts with the vector of the
    word with one. Training is free to change all of it.
    """
    config = model.config
    half = config.hidden_size // 2
    frequencies = model.model.rotary_emb.inv_freq  # [pair]
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, :half].normal_(std=EMBEDDING_SCALE)
        embedding[:, 0] = 3 * EMBEDDING_SCALE
        embedding[:, half:] = 0
        first = model.model.layers[0].self_attn
        fast = frequencies > LOCAL_FREQUENCY
        for head in range(config.num_attention_heads):
            rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            angle = -(head + 1) * frequencies
            first.q_proj.weight[rows, 0] = LOCAL_GAIN * torch.cat([angle.cos() * fast, angle.sin() * fast])
            first.k_proj.weight[rows, 0] = LOCAL_GAIN * torch.cat([fast, torch.zeros_like(frequencies)])
        first.o_proj.weight[:half] = 0
        second = model.model.layers[1].self_attn
        scale = torch.where(frequencies < FAR_FREQUENCY, FAR_GAIN, 1.0).repeat(2 * config.num_attention_heads)
        second.q_proj.weight *= scale[:, None]
        second.q_proj.weight[:, :half] = 0
        second.k_proj.weight.copy_(second.q_proj.weight)
        second.v_proj.weight[:, half:] = 0
        second.v_proj.weight[:, 0] = 0  # common to all tokens
        second.v_proj.weight *= COPY_GAIN
        second.o_proj.weight.copy_(second.v_proj.weight.T)
        output = model.lm_head.weight
        output.copy_(OUTPUT_GAIN * embedding)
        output[:, 0] = 0
        for word in words.ADJECTIVES:
            alone = tokenizer.encode(word, add_special_tokens=False)[0]
            spaced = tokenizer.encode(f" {word}", add_special_tokens=False)[0]
            output[alone] = output[spaced]
