"""One pool's decode steps as CUDA graphs: the model's for every batch shape, the draws' for every kind.

A captured step uses buffers at fixed addresses, into which a batch is copied once. Each step reads the
buffers, writes its logits, draws, and advances the buffers to the next step. Between the steps of a launch,
the host only starts replays. Draws that need more than a slot's parameters (penalties, masks,
log-probabilities and the like) are not captured; they run on the same logits.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from backends.torch_backend.forward.plan import DecodePlan
from backends.torch_backend.sampling.logprobs import Sampled
from backends.torch_backend.sampling.sampler import DrawKind, DrawPlan, Sampler

logger = logging.getLogger(__name__)

Recordable: TypeAlias = Callable[[], None]
"""A function of static shapes that reads and writes tensors in place and never waits for the device."""
Recorder: TypeAlias = Callable[[Recordable], Recordable]
"""Returns a function that does the same faster."""

Forward = Callable[[DecodePlan], Tensor]  # returns the logits [slot, vocabulary] of a plan's next step


class DecodeGraphs:
    """The recorded steps of one pool.

    `plans` are idle plans, one for each shape and the largest first. They share one input tensor.
    """

    def __init__(self, forward: Forward, sampler: Sampler, plans: list[DecodePlan]) -> None:
        self._forward = forward
        self._sampler = sampler
        self._plans = {plan.bucket: plan for plan in plans}
        self._output_index = torch.zeros_like(plans[0].inputs[0])
        self._logits = torch.empty(0)
        self._forwards: dict[tuple[int, tuple[int, ...]], Recordable] = {}  # by bucket
        self._draws: dict[tuple[int, DrawKind], Recordable] = {}  # by number of slots

    @property
    def num_recorded(self) -> int:
        return len(self._forwards) + len(self._draws)

    def record(self, recorder: Recorder) -> None:
        """Record all shapes and kinds, none of them later. A model that cannot be recorded runs eagerly."""
        start = time.monotonic()
        try:
            with torch.inference_mode():
                self._record(recorder)
        except RuntimeError as error:
            self._forwards.clear()
            self._draws.clear()
            logger.warning("decode steps run without CUDA graphs: the model cannot be captured: %s", error)
            return
        logger.info("recorded %d decode steps in %.1f s", self.num_recorded, time.monotonic() - start)

    def run(self, plan: DecodePlan, draw_plan: DrawPlan, num_steps: int) -> list[Sampled] | None:
        """Return the draws of `num_steps` steps; None where steps of this shape are not recorded."""
        forward = self._forwards.get(plan.bucket)
        static_plan = self._plans.get(plan.bucket)
        if forward is None or static_plan is None:
            return None
        num_slots = plan.bucket[0]
        static_plan.inputs.copy_(plan.inputs)
        self._output_index[:num_slots] = draw_plan.output_index
        draw = None if draw_plan.kind is None else self._draws[num_slots, draw_plan.kind]
        steps = []
        for step in range(num_steps):
            forward()
            if draw is None:
                steps.append(self._sampler.sample(self._logits[:num_slots], draw_plan, step))
                static_plan.advance(steps[-1].token_ids)
            else:
                draw()  # advances the plan itself
                steps.append(Sampled(static_plan.inputs[0].clone()))
        return steps

    def _record(self, recorder: Recorder) -> None:
        # One buffer for all shapes, the first of which is the largest: a graph writes to the address that it
        # was captured with.
        widest = next(iter(self._plans.values()))
        self._logits = torch.empty_like(self._forward(widest))
        for bucket, plan in self._plans.items():
            self._forwards[bucket] = recorder(self._recordable_forward(plan))
        by_num_slots = {plan.bucket[0]: plan for plan in self._plans.values()}
        for num_slots, plan in by_num_slots.items():
            for kind in DrawKind:
                self._draws[num_slots, kind] = recorder(self._recordable_draw(plan, kind))

    def _recordable_forward(self, plan: DecodePlan) -> Recordable:
        logits = self._logits[: plan.bucket[0]]

        def forward() -> None:
            logits.copy_(self._forward(plan))

        return forward

    def _recordable_draw(self, plan: DecodePlan, kind: DrawKind) -> Recordable:
        num_slots = plan.bucket[0]
        logits = self._logits[:num_slots]
        output_index = self._output_index[:num_slots]

        def draw() -> None:
            draw_plan = self._sampler.plan_of_kind(kind, plan.is_live, output_index)
            plan.advance(self._sampler.sample(logits, draw_plan).token_ids)
            output_index.add_(1)

        return draw


class CudaRecorder:
    """Captures functions as CUDA graphs.

    All graphs share one memory pool, so that a function's results must be in tensors that existed before.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, function: Recordable) -> Recordable:
        """Return the function's replay. Raises RuntimeError if it waits for the device."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()  # libraries initialise themselves in the first call, which cannot be captured
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            function()
        return graph.replay
