"""The evaluation models' curricula: the length of the texts, and the weights of the tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from examples.training import stage

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


@dataclass(frozen=True, kw_only=True)
class Stage(stage.Stage):
    """One stage of the curriculum."""

    lengths: tuple[int, ...]  # tokens of a context; one is drawn for each batch
    num_tokens: int  # of the contexts of a batch, together
    weights: Mapping[str, float]  # of the tasks
    # Changes the second layer before the first step. Only what follows its attention learns then.
    changes_second_layer: bool = False


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
    Stage(
        name="160 to 320 tokens",
        lengths=(160, 240, 320),
        num_tokens=1600,
        max_steps=250,
        weights=WEIGHTS,
    ),
    Stage(
        name="up to 2,560 tokens",
        lengths=(200, 320, 640, 1280, 2560),
        num_tokens=2560,
        max_steps=400,
        max_position=6000,
        weights=WEIGHTS,
        rate=1e-3,
        final_rate=0.0,
    ),
)
LONGER = Stage(
    name="up to 4,000 tokens",
    lengths=(320, 640, 1280, 2560, 4000),
    num_tokens=2560,
    max_steps=240,
    max_position=6000,
    weights=HARDER,
    rate=8e-4,
    final_rate=0.0,
)
HARD = Stage(
    name="the hardest at up to 4,000 tokens",
    lengths=(640, 1280, 2560, 4000),
    num_tokens=2560,
    max_steps=600,
    max_position=6000,
    weights=HARDEST,
    rate=8e-4,
    final_rate=0.0,
)
LLAMA_STAGES = (
    *BEGINNING,
    replace(LONGER, max_steps=72, final_rate=5.6e-4),
    replace(HARD, max_steps=300),
    Stage(
        name="mostly records",
        lengths=(320, 640, 1280, 4000),
        num_tokens=2560,
        max_steps=300,
        max_position=6000,
        weights=RECORDS,
        rate=8e-4,
        final_rate=0.0,
    ),
    replace(HARD, name="UUIDs and lists", max_steps=250, weights=UUIDS, rate=6e-4),
    Stage(
        name="what follows a number",
        lengths=(320, 640, 1280),
        num_tokens=2560,
        max_steps=70,
        max_position=6000,
        weights=RECORDS,
        changes_second_layer=True,
    ),
    replace(LONGER, name="counting", max_steps=112, weights=COUNTING, final_rate=3.52e-4),
    replace(HARD, name="chains and UUIDs", max_steps=110, weights=CHAINS, rate=5e-4),
)
# The names seed the batches: renaming a stage changes what it trains on.
STAGES = {"llama": LLAMA_STAGES, "qwen": (*BEGINNING, LONGER, HARD)}  # by family
