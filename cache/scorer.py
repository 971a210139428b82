"""How the tokens of a prompt are scored that may be kept, as data; `cache.scoring` computes the scores."""

import enum
from dataclasses import dataclass


class SoftmaxDomain(enum.StrEnum):
    """The keys over which an observation query's attention is normalised."""

    CANDIDATES = "candidates"  # SnapStream, equation 3
    ALL = "all"  # SnapKV, and SnapStream's listing 6


class Pooling(enum.StrEnum):
    AVERAGE = "average"
    MAXIMUM = "maximum"


class QueryReduction(enum.StrEnum):
    """How the votes of the observation window's queries become one."""

    SUM = "sum"  # SnapKV and SnapStream
    MAXIMUM = "maximum"  # one query that looks for a token is enough, however many look elsewhere


class HeadReduction(enum.StrEnum):
    """How the votes of the query heads that share a KV head become one."""

    MEAN = "mean"
    MAXIMUM = "maximum"


@dataclass(frozen=True, slots=True)
class WindowScorer:
    """Scores prompt tokens by the attention that the last `observation_window` prompt tokens pay to them (SnapKV, arXiv 2404.14469).

    As it stands it is SnapStream's published recipe, as far as that is known; `DEFAULT_SCORERS` has what is used where nobody says more.
    A token's score is pooled over `pooling_size` tokens centred `pooling_shift` tokens before it, so that a token that is attended to
    lends its score to more of those that follow it. With a `pooling_half_life`, what it lends halves with every so many tokens of
    distance, so that many finds keep what is nearest to them where there is room for little; 0: all alike. With a `selection_chunk`
    above 1, chunks of so many neighbouring tokens are kept whole, those with the highest mean score (ChunkKV, arXiv 2502.00299). With an
    `observation_half_life`, the vote of a token so far from the prompt's end counts half, since the question is more often there; 0: all
    count alike.
    """

    observation_window: int = 32
    observation_half_life: int = 0
    softmax_domain: SoftmaxDomain = SoftmaxDomain.CANDIDATES
    pooling: Pooling = Pooling.AVERAGE
    pooling_size: int = 5
    pooling_shift: int = 0
    pooling_half_life: int = 0
    head_reduction: HeadReduction = HeadReduction.MEAN
    query_reduction: QueryReduction = QueryReduction.SUM
    selection_chunk: int = 1

    def __post_init__(self) -> None:
        if self.observation_window < 1:
            raise ValueError(f"observation_window must be at least 1, got {self.observation_window}")
        if self.observation_half_life < 0:
            raise ValueError(f"observation_half_life must be at least 0, got {self.observation_half_life}")
        if self.pooling_size < 1 or self.pooling_size % 2 == 0:
            raise ValueError(f"pooling_size must be odd and at least 1, got {self.pooling_size}")
        if not 0 <= self.pooling_shift <= self.pooling_size // 2:
            raise ValueError(
                f"pooling_shift must be from 0 to half the pooling_size of {self.pooling_size}, got {self.pooling_shift}"
            )
        if self.pooling_half_life < 0:
            raise ValueError(f"pooling_half_life must be at least 0, got {self.pooling_half_life}")
        if self.selection_chunk < 1:
            raise ValueError(f"selection_chunk must be at least 1, got {self.selection_chunk}")
