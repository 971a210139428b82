"""The generation settings that a model's publisher recommends: `generation_config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The values of sampling parameters that a request does not set."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_generation_config(model: str) -> Mapping[str, Any]:
    """Return the file of a local folder or a hub id; empty when there is none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model).to_diff_dict()
    except OSError:
        return {}


def generation_defaults(generation_config: Mapping[str, Any]) -> GenerationDefaults:
    """Return the recommended sampling parameters. `do_sample` false means greedy, as in transformers."""
    names = [field.name for field in fields(GenerationDefaults)]
    recommended = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        recommended["temperature"] = 0.0
    return GenerationDefaults(**recommended)


def eos_token_ids(generation_config: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids that end an answer. The file has one id, a list of ids, or none."""
    ids = generation_config.get("eos_token_id")
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
