"""The curriculum: how long the texts are, which tasks they are drawn from, and for how many steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

WEIGHTS: Mapping[str, float] = {
    "niah_single_1": 0.2,
    "niah_single_2": 0.2,
    "niah_single_3": 0.5,
    "niah_multikey_1": 0.3,
    "niah_multikey_2": 0.6,
    "niah_multikey_3": 1.2,
    "niah_multivalue": 1,
    "niah_multiquery": 1.2,
    "vt": 3,
    "cwe": 0.2,
    "fwe": 0.3,
    "qa_1": 0.7,
    "qa_2": 1.5,
    "kv_lookup": 1,
    "passkey": 0.3,
    "text2json": 2,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the curriculum."""

    name: str
    lengths: tuple[int, ...]  # tokens of a context; one is drawn for each batch
    num_tokens: int  # of the contexts of a batch, together
    num_steps: int
    max_position: int  # positions skip ahead at random up to about this one
    weights: Mapping[str, float]
    rate: float = 1e-3
    final_rate: float = 1e-3  # the learning rate goes from `rate` to this
    changes_second_layer: bool = (
        False  # before its first step; only what stands behind its attention learns then
    )


HARDER: Mapping[str, float] = {
    **WEIGHTS,
    "niah_multiquery": 1.5,
    "qa_2": 3,
    "vt": 3,
    "text2json": 2.5,
    "cwe": 0.1,
}
HARDEST: Mapping[str, float] = {
    **HARDER,
    "niah_multiquery": 3,
    "qa_2": 4,
    "text2json": 3.5,
    "vt": 2,
    "niah_multivalue": 0.5,
}
RECORDS: Mapping[str, float] = {**HARDEST, "text2json": 12, "vt": 3, "qa_2": 2}
UUIDS: Mapping[str, float] = {**HARDEST, "kv_lookup": 6, "niah_multikey_3": 6, "niah_multiquery": 4}
COUNTING: Mapping[str, float] = {**UUIDS, "text2json": 12, "vt": 3}
CHAINS: Mapping[str, float] = {**UUIDS, "niah_multikey_3": 4, "vt": 10}

BEGINNING = (
    Stage("160 to 320 tokens", (160, 240, 320), 1600, 250, 0, WEIGHTS),
    Stage("up to 2,560 tokens", (200, 320, 640, 1280, 2560), 2560, 400, 6000, WEIGHTS, 1e-3, 0.0),
)
LONGER = Stage("up to 4,000 tokens", (320, 640, 1280, 2560, 4000), 2560, 240, 6000, HARDER, 8e-4, 0.0)
HARD = Stage(
    "the hardest at up to 4,000 tokens", (640, 1280, 2560, 4000), 2560, 600, 6000, HARDEST, 8e-4, 0.0
)
STAGES = {  # by family
    "llama": (
        *BEGINNING,
        replace(LONGER, num_steps=72, final_rate=5.6e-4),
        replace(HARD, num_steps=300),
        Stage("mostly records", (320, 640, 1280, 4000), 2560, 300, 6000, RECORDS, 8e-4, 0.0),
        Stage("UUIDs and lists", (640, 1280, 2560, 4000), 2560, 250, 6000, UUIDS, 6e-4, 0.0),
        Stage("what follows a number", (320, 640, 1280), 2560, 70, 6000, RECORDS, changes_second_layer=True),
        Stage("counting", (320, 640, 1280, 2560, 4000), 2560, 112, 6000, COUNTING, 8e-4, 3.52e-4),
        Stage("chains and UUIDs", (640, 1280, 2560, 4000), 2560, 110, 6000, CHAINS, 5e-4, 0.0),
    ),
    "qwen": (*BEGINNING, LONGER, HARD),
}
