"""Speculative prefill in a simulation: a draft reads long prompts first, the model what is kept of them."""

import math
from dataclasses import dataclass, replace

from backends.config import DRAFT_POOL
from backends.fake import slot_pool
from backends.interface import BackendSpec, Batch, Importance, ScratchSpec
from backends.sn40l.step.cost_model import DeploymentCost
from backends.sn40l.step.deployment import Deployment, Execution
from backends.sn40l.step.prefill import Chunk, Compression, prefill_seconds
from backends.timed import CostModel
from cache.scratch import ScratchLayout

IMPORTANCE = Importance()  # what a draft measures of a prompt


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft for prompts of at least `threshold` tokens.

    `keep` is a share of their chunks of at most 1, or a number of tokens.
    """

    deployment: Deployment
    threshold: int
    keep: float

    def on(self, deployment: Deployment) -> "Drafting":
        """Return the same draft on the sockets and the machine of `deployment`."""
        return replace(self, deployment=replace(deployment, model=self.deployment.model, beside=()))

    def num_read(self, num_prompt_tokens: int) -> int:
        """Return how many of a prompt's tokens the model reads: all of those that the draft does not take."""
        if not self.threshold <= num_prompt_tokens <= self.deployment.model.max_positions:
            return num_prompt_tokens
        if self.keep > 1:
            return min(num_prompt_tokens, int(self.keep))
        chunk = IMPORTANCE.chunk_tokens
        return min(num_prompt_tokens, chunk * math.ceil(self.keep * math.ceil(num_prompt_tokens / chunk)))

    def seconds(self, num_prompt_tokens: int) -> float:
        """Return how long the draft reads a prompt, in one step."""
        scorer = DRAFT_POOL.policy.resolve(num_prompt_tokens).scorer
        assert scorer is not None
        scoring = Compression(0, 0, scorer.observation_window)
        return prefill_seconds(self._fused, Chunk(num_prompt_tokens, 0, scoring))

    @property
    def _fused(self) -> Deployment:
        return replace(self.deployment, execution=Execution.FUSED)

    def spec(self, of_model: BackendSpec) -> BackendSpec:
        """Return the limits of the model with this draft beside it."""
        size = min(of_model.max_model_len, self.deployment.model.max_positions)
        pool = slot_pool(0, DRAFT_POOL.policy.resolve(size), size, "draft")
        scratch = ScratchSpec(1, ScratchLayout(size))
        draft = replace(of_model, max_model_len=size, pools=(pool,), scratch=scratch, prefixes=None)
        return replace(of_model, drafts=(draft,))

    def cost(self, of_model: CostModel, spec: BackendSpec) -> CostModel:
        """Return the cost model of a backend of `spec`."""
        (draft,) = spec.drafts
        return _SharedMachine(spec, (of_model, DeploymentCost(self._fused, *draft.pools)))


@dataclass(frozen=True, slots=True)
class _SharedMachine:
    """Several models that take turns on one machine."""

    spec: BackendSpec
    costs: tuple[CostModel, ...]

    def seconds(self, batch: Batch) -> float:
        index, pool = self.spec.model_of(batch.pool)
        return self.costs[index].seconds(batch if index == 0 else replace(batch, pool=pool))
