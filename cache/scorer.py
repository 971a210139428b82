"""How prompt tokens are scored when not all can be kept, as data. `cache.scoring` computes the scores."""

import enum
from dataclasses import dataclass


class SoftmaxDomain(enum.StrEnum):
    """The keys over which an observation query's attention is normalised."""

    CANDIDATES = "candidates"  # SnapStream, equation 3
    ALL = "all"  # SnapKV, and SnapStream's listing 6


class Pooling(enum.StrEnum):
    """How the votes of neighbouring tokens become one token's score."""

    AVERAGE = "average"
    MAXIMUM = "maximum"


class QueryReduction(enum.StrEnum):
    """How the votes of the observation window's queries become one."""

    SUM = "sum"  # SnapKV and SnapStream
    MAXIMUM = "maximum"  # one query that attends to a token is enough, however many attend elsewhere


class HeadReduction(enum.StrEnum):
    """How the votes of the query heads that share a KV head become one."""

    MEAN = "mean"
    MAXIMUM = "maximum"


@dataclass(frozen=True, slots=True)
class WindowScorer:
    """Scores prompt tokens by the attention of the prompt's last tokens (SnapKV, arXiv 2404.14469).

    The defaults are SnapStream's published recipe, as far as it is known. `DEFAULT_SCORERS` are those of the
    policies.

    - A token's score is pooled over `pooling_size` tokens, centred `pooling_shift` tokens before it. A token
      that is attended to thus lends its score to more of the tokens that follow it.
    - The score that it lends halves with every `pooling_half_life` tokens of distance. Where there is room
      for little, many finds then keep their nearest neighbours. 0: all neighbours count alike.
    - With a `selection_chunk` above 1, chunks of that many neighbours are kept whole, those with the highest
      mean score (ChunkKV, arXiv 2502.00299).
    - The vote of a token halves with every `observation_half_life` tokens of distance from the prompt's end,
      down to `least_vote`: instructions may follow the question. 0: all votes count alike.
    - The first `num_echoed` tokens of the question are read again behind the prompt, and vote too. So a
      question before a long text selects what is kept of it. 0: nothing is read again.
    """

    observation_window: int = 32
    observation_half_life: int = 0
    least_vote: float = 0.0
    softmax_domain: SoftmaxDomain = SoftmaxDomain.CANDIDATES
    pooling: Pooling = Pooling.AVERAGE
    pooling_size: int = 5
    pooling_shift: int = 0
    pooling_half_life: int = 0
    head_reduction: HeadReduction = HeadReduction.MEAN
    query_reduction: QueryReduction = QueryReduction.SUM
    selection_chunk: int = 1
    num_echoed: int = 0

    def __post_init__(self) -> None:
        self._check_at_least("observation_window", 1)
        self._check_at_least("observation_half_life", 0)
        if self.pooling_size < 1 or self.pooling_size % 2 == 0:
            raise ValueError(f"pooling_size must be odd and at least 1, got {self.pooling_size}")
        if not 0 <= self.pooling_shift <= self.pooling_size // 2:
            raise ValueError(
                f"pooling_shift must be from 0 to half the pooling_size of {self.pooling_size}, "
                f"got {self.pooling_shift}"
            )
        self._check_at_least("pooling_half_life", 0)
        self._check_at_least("selection_chunk", 1)
        if not 0 <= self.least_vote <= 1:
            raise ValueError(f"least_vote must be from 0 to 1, got {self.least_vote}")
        self._check_at_least("num_echoed", 0)

    def _check_at_least(self, name: str, least: int) -> None:
        value: int = getattr(self, name)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
