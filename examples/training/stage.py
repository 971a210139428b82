"""The base of all curricula's stages."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a curriculum. The learning rate goes linearly from `rate` to `final_rate`."""

    name: str
    max_steps: int
    max_position: int = 0  # positions are skipped at random up to about this one; 0: no skips
    rate: float = 1e-3
    final_rate: float = 1e-3
