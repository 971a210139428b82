"""The decode steps of one pool, recorded: for every shape that a batch may have one of the model, and for every kind of draw one.

What a step reads lies in buffers that stay where they are. A batch is copied there once; a step reads it, leaves its logits, draws, and
brings the buffers forward to the next one, so that between the steps of a launch the host has nothing to do but start them. Draws that
need more than a slot's parameters (penalties, masks, log-probabilities and the like) are made unrecorded, from the same logits.
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

Step: TypeAlias = Callable[[], None]
"""A function of fixed shapes that reads and writes tensors which stay in place, and never waits for the device."""
Recorder: TypeAlias = Callable[[Step], Step]

Forward = Callable[[DecodePlan], Tensor]  # the logits [slot, vocabulary] of a plan's next step


class DecodeGraphs:
    """`plans` are idle ones, one for each shape and the largest first, that share the tensor of their numbers."""

    def __init__(self, forward: Forward, sampler: Sampler, plans: list[DecodePlan]) -> None:
        self._forward = forward
        self._sampler = sampler
        self._plans = {plan.bucket: plan for plan in plans}
        self._output_index = torch.zeros_like(plans[0].numbers[0])
        self._logits = torch.empty(0)
        self._passes: dict[tuple[int, tuple[int, ...]], Step] = {}
        self._draws: dict[tuple[int, DrawKind], Step] = {}

    @property
    def num_recorded(self) -> int:
        return len(self._passes) + len(self._draws)

    def record(self, recorder: Recorder) -> None:
        """Record all there is to record; nothing is recorded later. A model whose step cannot be recorded is left as it is."""
        start = time.monotonic()
        try:
            with torch.inference_mode():
                self._record(recorder)
        except RuntimeError as error:
            self._passes.clear()
            self._draws.clear()
            logger.warning("decode steps are not recorded, since this model's cannot be: %s", error)
            return
        logger.info("recorded %d decode steps in %.1f s", self.num_recorded, time.monotonic() - start)

    def run(self, plan: DecodePlan, draw_plan: DrawPlan, num_steps: int) -> list[Sampled] | None:
        """Return what `num_steps` steps draw; None where steps of this shape are not recorded."""
        forward, static = self._passes.get(plan.bucket), self._plans.get(plan.bucket)
        if forward is None or static is None:
            return None
        num_slots = plan.bucket[0]
        static.numbers.copy_(plan.numbers)
        self._output_index[:num_slots] = draw_plan.output_index
        draw = None if draw_plan.kind is None else self._draws[num_slots, draw_plan.kind]
        steps = []
        for number in range(num_steps):
            forward()
            if draw is None:
                steps.append(self._sampler.sample(self._logits[:num_slots], draw_plan, number))
                static.advance(steps[-1].token_ids)
            else:
                draw()
                steps.append(Sampled(static.numbers[0].clone()))
        return steps

    def _record(self, recorder: Recorder) -> None:
        widest = next(iter(self._plans.values()))
        self._logits = torch.empty_like(self._forward(widest))
        for bucket, plan in self._plans.items():
            self._passes[bucket] = recorder(self._pass(plan))
        by_size = {plan.bucket[0]: plan for plan in self._plans.values()}
        for num_slots, plan in by_size.items():
            for kind in DrawKind:
                self._draws[num_slots, kind] = recorder(self._draw(plan, kind))

    def _pass(self, plan: DecodePlan) -> Step:
        logits = self._logits[: plan.bucket[0]]

        def step() -> None:
            logits.copy_(self._forward(plan))

        return step

    def _draw(self, plan: DecodePlan, kind: DrawKind) -> Step:
        logits, output_index = (tensor[: plan.bucket[0]] for tensor in (self._logits, self._output_index))

        def step() -> None:
            draw_plan = self._sampler.plan_of_kind(kind, plan.is_live, output_index)
            plan.advance(self._sampler.sample(logits, draw_plan).token_ids)
            output_index.add_(1)

        return step


class CudaRecorder:
    """Captures steps as CUDA graphs. They share their memory, so a step leaves nothing behind but in tensors that were there before."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Return the step's replay. Raises RuntimeError for a step that waits for the device."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()  # libraries set themselves up, which cannot be captured
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            step()
        return graph.replay
