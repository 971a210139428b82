"""The counts of work equal those of torch's counter and of transformers' models."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from bench.floor import (
    Machine,
    UnsupportedModelError,
    Work,
    decode_floors,
    measure_machine,
    prefill_floors,
    work_of,
)
from bench.make_model import model_config


def config(**changes: object) -> LlamaConfig:
    sizes: dict[str, object] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "attn_implementation": "eager",
    }
    return LlamaConfig(**(sizes | changes))  # type: ignore[arg-type]


def model(of: PreTrainedConfig) -> PreTrainedModel:
    made: PreTrainedModel = AutoModelForCausalLM.from_config(of, attn_implementation="eager")  # type: ignore[no-untyped-call]
    return made


@pytest.mark.parametrize("num_entries", [1, 7, 40])
def test_decode_operations_equal_torchs_count(num_entries: int) -> None:
    with torch.no_grad():
        llama = model(config())
        cache = DynamicCache()
        if num_entries > 1:
            llama(torch.zeros(1, num_entries - 1, dtype=torch.long), past_key_values=cache)
        with FlopCounterMode(display=False) as counter:
            llama(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    assert counter.get_total_flops() == work_of(config(), 2).decode_operations(1, num_entries)


def test_last_layer_counts_one_token_of_a_prompt_except_for_keys_and_values() -> None:
    full = work_of(config(num_hidden_layers=3), 2)
    shorter = work_of(config(num_hidden_layers=2), 2)
    before_last = sum(
        shorter.decode_operations(1, entries) - 2 * shorter.num_output for entries in range(1, 31)
    )
    last = full.decode_operations(1, 30) - shorter.decode_operations(1, 30)
    attention = model(config()).get_submodule("model.layers.0.self_attn")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for name in ("k_proj", "v_proj"):
            attention.get_submodule(name)(torch.zeros(29, config().hidden_size))
    expected = before_last + last + counter.get_total_flops() + 2 * full.num_output
    assert full.prefill_operations(30) == expected


@pytest.mark.parametrize("is_tied", [True, False])
def test_step_reads_every_weight_but_an_untied_embedding(is_tied: bool) -> None:
    of = config(tie_word_embeddings=is_tied, attention_bias=True)
    llama = model(of)
    read = sum(parameter.numel() for parameter in llama.parameters()) - (0 if is_tied else 100 * 48)
    assert work_of(of, 2).weight_bytes == 2 * read


def test_entry_bytes_equal_transformers_cache() -> None:
    with torch.no_grad():
        cache = DynamicCache()
        model(config())(torch.zeros(1, 5, dtype=torch.long), past_key_values=cache)
    held = sum(getattr(layer, plane).numel() for layer in cache.layers for plane in ("keys", "values"))
    assert 5 * work_of(config(), 2).entry_bytes == 2 * held


def test_benchmark_model_has_a_hundred_million_weights() -> None:
    work = work_of(model_config(), 2)
    assert work.weight_bytes == pytest.approx(200e6, rel=0.01)
    assert work.entry_bytes == 12 * 2 * 4 * 64 * 2


def test_floor_is_the_slower_of_reading_and_computing() -> None:
    work = Work(
        1,
        1,
        1,
        10,
        num_matrix=1000,
        num_key_value=100,
        num_output=0,
        num_other=0,
        bytes_per_element=2,
        bytes_per_weight=2,
        bytes_per_output_weight=2,
    )
    reads = Machine("", 1, 0.0, "", {"a": 50.0, "b": 100.0}, {"c": math.inf})
    computes = Machine("", 1, 0.0, "", {"a": math.inf}, {"c": 10.0, "d": 100.0})
    assert decode_floors(work, reads, batch=2, entries=5).seconds == (2000 + 2 * 5 * 40) / 100
    assert decode_floors(work, computes, batch=2, entries=5).seconds == 2 * (2000 + 40 * 5) / 100
    assert prefill_floors(work, reads, 3).seconds == 2000 / 100
    # The only layer is the last one.
    assert prefill_floors(work, computes, 3).seconds == (2 * (100 * 3 + 900) + 40 * 3) / 100


def test_prompts_of_a_batch_share_the_weights() -> None:
    work = work_of(config(), 2)
    machine = Machine("", 1, 0.0, "", {"a": 1.0}, {"c": 1.0})
    one = prefill_floors(work, machine, 30)
    four = prefill_floors(work, machine, 30, 4)
    assert (four.memory, four.matrix) == (one.memory, 4 * one.matrix)


def test_a_step_reads_the_experts_that_rows_choose() -> None:
    """One row reads its own; many rows read all. A row is multiplied by those that it chooses alone."""
    of = MixtralConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=100,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    work = work_of(of, 2)
    mixtral = model(of)
    experts = 3 * 8 * 3 * 48 * 80
    dense = sum(parameter.numel() for parameter in mixtral.parameters()) - experts - 100 * 48  # not tied
    assert work.weight_bytes == 2 * (dense + experts)
    assert work.decode_bytes(1, 0) == 2 * (dense + experts // 4)
    assert work.decode_bytes(2, 0) == 2 * (dense + experts * 7 // 16)
    assert work.decode_bytes(1000, 0) == 2 * (dense + experts)
    norms = (2 * 3 + 1) * 48
    assert work.decode_operations(3, 0) == 3 * 2 * (dense - norms + experts // 4)


@pytest.mark.parametrize("architecture", ["lfm2", "falcon_h1", "qwen3_next"])
def test_convolutions_are_no_experts(architecture: str) -> None:
    of = model_config(architecture)
    with torch.device("meta"):
        num_weights = sum(parameter.numel() for parameter in model(of).parameters())
    work = work_of(of, 2)
    assert (work.num_experts, work.num_chosen, work.num_expert) == (0, 0, 0)
    assert work.weight_bytes == 2 * num_weights  # the embedding is tied


def test_quantized_weights_count_their_own_bytes() -> None:
    work = work_of(config(), 2, (0.5, 1))
    assert work.weight_bytes == 0.5 * work.num_matrix + work.num_output + 2 * work.num_other


def test_compressed_attention_raises() -> None:
    with pytest.raises(UnsupportedModelError, match="kv_lora_rank = 512"):
        work_of(DeepseekV3Config(), 2)


def test_machine_is_measured_in_every_way() -> None:
    machine = measure_machine(torch.device("cpu"), torch.bfloat16, 2**20, (32, 64), seconds=0.01)
    assert len(machine.bandwidths) == 3
    sizes = ("32 × 32 × 32", "64 × 64 × 64")
    assert set(machine.matrix_rates) == {
        f"{size}, {name}" for size in sizes for name in ("float32", "bfloat16")
    }
    assert all(0 < rate < math.inf for rate in (*machine.bandwidths.values(), *machine.matrix_rates.values()))
    assert machine.bandwidth == max(machine.bandwidths.values())
