"""What the keys and values of a model depend on, beside its tokens, as one name."""

import hashlib
import json
from collections.abc import Sequence
from importlib import metadata

import torch
from transformers import PreTrainedModel

_PLACES = ("_name_or_path", "transformers_version")  # of a config: where it is from
_SAMPLE_BYTES = 2**16  # of each tensor


def fingerprint(model: PreTrainedModel, *facts: object) -> str:
    """Return a hash of a model's configuration and weights, its device's type, versions, and `facts`.

    Reads all weights: about a second a gigabyte.
    """
    return _hash(model, facts, None)


def sampled_fingerprint(model: PreTrainedModel, *facts: object) -> str:
    """Return a hash as `fingerprint` does, of the beginning of each weight, in milliseconds.

    Models that differ only behind the first 64 KiB of each tensor have the same.
    """
    return _hash(model, facts, _SAMPLE_BYTES)


def _hash(model: PreTrainedModel, facts: Sequence[object], most_bytes: int | None) -> str:
    config = {key: value for key, value in model.config.to_dict().items() if key not in _PLACES}
    versions = [metadata.version(name) for name in ("snapserve", "torch", "transformers")]
    described = [config, versions, model.device.type, str(model.dtype), [repr(fact) for fact in facts]]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    hashed: set[int] = set()  # tied weights count once
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in hashed:
            hashed.add(tensor.data_ptr())
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)[:most_bytes]
            digest.update(content.cpu().numpy())
    return digest.hexdigest()[:32]
