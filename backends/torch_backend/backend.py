"""A transformers model on a device of torch's, decoding over SnapStream slots."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.clock import Clock, WallClock
from backends.interface import (
    BackendError,
    BackendSpec,
    BackendUnusableError,
    Batch,
    BatchResult,
    DecodeBatch,
    DecodeRow,
    Draw,
    Pending,
    PrefillBatch,
    PrefillRow,
    PromptPooling,
    SampledToken,
    SamplingParams,
    ScratchSpec,
)
from backends.torch_backend.config import TorchBackendConfig
from backends.torch_backend.cuda_graphs import CudaRecorder, DecodeGraphs, Recorder
from backends.torch_backend.forward.cache import ModelCache
from backends.torch_backend.forward.last_layer import shorten_last_layer
from backends.torch_backend.forward.plan import (
    DecodePlan,
    ForwardPass,
    decode_plan,
    idle_plans,
    look_ahead_pass,
    prefill_pass,
)
from backends.torch_backend.model.induction import measure_look_up
from backends.torch_backend.model.latent import replace_latent_attention
from backends.torch_backend.model.linear import KINDS, replace_all_linears
from backends.torch_backend.model.loading import load_model
from backends.torch_backend.model.probe import LayerSpec, probe_layers
from backends.torch_backend.native.kernels import Kernels, kernels_are_supported
from backends.torch_backend.pool import TorchPool
from backends.torch_backend.sampling.logprobs import Sampled, log_probabilities, steps_to_host
from backends.torch_backend.sampling.sampler import DrawPlan, check_token_ids
from backends.torch_backend.spec import (
    backend_spec,
    layer_kinds,
    most_slot_entries,
    pool_spec,
    resolve_max_model_len,
    scratch_layout,
    with_layer_budgets,
)
from backends.torch_backend.torch_private import missing_interfaces
from cache.layout import SlotLayout
from cache.policy import CachePolicy
from cache.slots import SlotCache

if TYPE_CHECKING:
    from backends.torch_backend.compiled.code import CompiledCode

logger = logging.getLogger(__name__)

_SCORED_AT_ONCE = 64  # prompt tokens whose log-probabilities are held at once


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that has ended: computed as it was submitted."""

    outcome: BatchResult | BackendError

    def result(self) -> BatchResult:
        if isinstance(self.outcome, BackendError):
            raise self.outcome
        return self.outcome


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a `BatchResult` tells, without the time it took."""

    tokens: tuple[tuple[SampledToken, ...], ...]
    prompt_logprobs: tuple[tuple[SampledToken, ...], ...] = ()
    hidden: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Running:
    """A step that the device may still be at. `collect` may be called once `wait` has returned."""

    clock: Clock
    started: float
    wait: Callable[[], None]
    collect: Callable[[], Outcome]

    def result(self) -> BatchResult:
        try:
            self.wait()
            return _result(self.collect(), self.clock.now() - self.started)
        except Exception as error:
            raise _failure(error) from error


class TorchBackend:
    """Raises ModelLoadError for a model that cannot be served, ValueError for sizes that do not go together."""

    def __init__(
        self,
        config: TorchBackendConfig,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        """Decode steps are recorded by `recorder`; without one on CUDA as graphs, if the config says so, and elsewhere not.

        A `model` that is given is not loaded again; it was made with `ATTENTION_NAME`, and may be changed.
        """
        self._clock = clock or WallClock()
        self._model = model or load_model(config.model, config.device, config.dtype)
        self._device = self._model.device
        replace_latent_attention(self._model)
        self._kernels = Kernels()
        replace_all_linears(self._model, self._kernels, KINDS[config.quantization])
        layers = probe_layers(self._model)
        max_model_len = resolve_max_model_len(config, self._model.config)
        policies = self._policies(config, layers, max_model_len)
        kinds, kind_of = zip(
            *(layer_kinds(policy, layers, max_model_len) for policy in policies), strict=True
        )
        every_kind = [kind for of_pool in kinds for kind in of_pool]
        layout = scratch_layout(config.scratch_capacity, max_model_len, config.prefill_chunk, every_kind)
        entries = SlotLayout(0, layout.num_entries, 0)
        scratches = [
            SlotCache(entries, config.num_scratch, layer.num_kv_heads, layer.planes, self._device)
            for layer in layers
        ]
        vocab_size, pools = self._model.config.vocab_size, []
        for number, options in enumerate(config.pools):
            spec = pool_spec(options, policies[number], kinds[number], max_model_len)
            pools.append(
                TorchPool.build(
                    spec,
                    kinds[number],
                    kind_of[number],
                    layers,
                    scratches,
                    vocab_size,
                    self._device,
                    self._kernels,
                )
            )
        self.pools = tuple(pools)
        if recorder is None and config.compile and self._device.type == "cuda":
            recorder = CudaRecorder(self._device)
        self._recorder = recorder
        self._graphs: tuple[DecodeGraphs, ...] = ()
        specs = tuple(pool.spec for pool in pools)
        self._spec = backend_spec(
            config, self._model.config, max_model_len, specs, ScratchSpec(config.num_scratch, layout)
        )
        self.compiled: CompiledCode | None = None
        if self._device.type == "cpu" and self._may_compile(config):
            from backends.torch_backend.compiled import code as compiled_code

            self.compiled = compiled_code.CompiledCode(
                config.compile_cache, self._model, self.pools, max_model_len - 1, self._kernels
            )
        shorten_last_layer(self._model)

    def _may_compile(self, config: TorchBackendConfig) -> bool:
        """Return whether decode is to be compiled, and can be. Logs a warning if this torch lacks what the backend needs."""
        is_wanted = config.compile and kernels_are_supported()
        missing = missing_interfaces(for_compiling=is_wanted)
        if missing:
            logger.warning(
                "torch %s lacks private interfaces that the backend needs: %s. It runs without them, and slower: "
                "linear layers may be torch's own, and decode is not compiled.",
                torch.__version__,
                "; ".join(missing),
            )
        return is_wanted and not missing

    def _policies(
        self, config: TorchBackendConfig, layers: Sequence[LayerSpec], max_model_len: int
    ) -> list[CachePolicy]:
        policies = [options.policy.resolve(max_model_len) for options in config.pools]
        if not any(options.policy.measures_layers for options in config.pools):
            return policies
        measured = measure_look_up(self._model, len(layers), max_model_len)
        most = most_slot_entries(policies, max_model_len, config.scratch_capacity)
        return [
            with_layer_budgets(
                policy, layers, measured, max_model_len, most, leads=options.policy.has_leading_layer
            )
            if options.policy.measures_layers
            else policy
            for policy, options in zip(policies, config.pools, strict=True)
        ]

    @property
    def spec(self) -> BackendSpec:
        return self._spec

    @property
    def num_recorded(self) -> int:
        """How many steps were recorded; none are after the warm-up."""
        return sum(graphs.num_recorded for graphs in self._graphs)

    def warmup(self) -> None:
        """Read a chunk of every shape and decode once in each pool. No slot holds anything yet, and every prompt clears what it takes."""
        draw = Draw(SamplingParams(temperature=0.0))
        shapes = self._spec.prefill_shapes
        for number, pool in enumerate(self._spec.pools):
            for shape, scratch in [(shapes[0], 0), *((shape, None) for shape in shapes)]:
                chunk = (0,) * min(shape.num_tokens, pool.max_direct_tokens)
                row = PrefillRow("warmup", chunk, 0, len(chunk), slots=(0,), scratch=scratch, draws=(draw,))
                self.submit(PrefillBatch((row,), shape, number)).result()
            self.submit(DecodeBatch((DecodeRow("warmup", 0, 0, 1, 1, draw),), pool=number)).result()
        if self._recorder is not None:
            self._graphs = tuple(self._record(pool, self._recorder) for pool in self.pools)
        if self.compiled is not None:
            self.compiled.start()

    def submit(self, batch: Batch) -> Pending:
        """Start a step, which on a CPU ends here. Whatever goes wrong comes out of the pending step's `result`."""
        if self.compiled is not None:
            self.compiled.poll()
        started = self._clock.now()
        try:
            with torch.inference_mode():
                collect = self._prefill(batch) if isinstance(batch, PrefillBatch) else self._decode(batch)
                if self._device.type == "cuda":
                    ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    ended.record(torch.cuda.current_stream(self._device))
                    return Running(self._clock, started, ended.synchronize, collect)
            return Finished(_result(collect(), self._clock.now() - started))
        except Exception as error:
            return Finished(_failure(error))

    def close(self) -> None:
        """Give the device's memory back."""
        if self.compiled is not None:
            self.compiled.close()
        del self._model, self.pools, self._graphs, self._recorder
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _record(self, pool: TorchPool, recorder: Recorder) -> DecodeGraphs:
        """Record the pool's decode steps."""
        limits = pool.spec.num_slots, self._spec.max_model_len, self._spec.max_decode_steps
        graphs = DecodeGraphs(
            lambda plan: self._decode_logits(pool, plan),
            pool.sampler,
            idle_plans(pool.kinds, *limits, self._device),
        )
        graphs.record(recorder)
        return graphs

    def _forward(self, cache: ModelCache, forward_pass: ForwardPass, num_logits: int) -> Tensor:
        """Return the logits of each row's last `num_logits` tokens, [row, token, vocabulary]; 0: of all."""
        logits: Tensor = self._call(self._model, cache, forward_pass, logits_to_keep=num_logits).logits
        return logits

    def _call(self, model: nn.Module, cache: ModelCache, forward_pass: ForwardPass, **options: int) -> Any:
        """Run the model, or the part of it that ends at its last norm."""
        return model(**forward_pass.arguments(cache), **options)

    def _prefill(self, batch: PrefillBatch) -> Callable[[], Outcome]:
        for row in batch.rows:
            check_token_ids(
                row.token_ids + (row.score.target_ids if row.score else ()), self._spec.vocab_size
            )
        pool = self.pools[batch.pool]
        for row in batch.rows:
            self._begin_chunk(pool, row)
        outcome = self._read(pool, batch)
        for row in batch.rows:
            if row.ahead:
                self._give_up(pool, row)
        return lambda: outcome

    def _read(self, pool: TorchPool, batch: PrefillBatch) -> Outcome:
        """Read a batch's chunks, and place the prompts that end with them."""
        forward_pass = prefill_pass(batch, pool.kinds, self._spec.scratch.layout, self._device)
        if batch.rows[0].pooling is not None:
            return Outcome(((),) * len(batch.rows), hidden=self._pooled(batch, pool.cache, forward_pass))
        logits = self._next_logits(batch, pool.cache, forward_pass)
        for row in batch.rows:
            if row.is_last and row.slots:
                self._place_prompt(pool, row)
        if logits is None:
            return Outcome(((),) * len(batch.rows), ((),) * len(batch.rows))
        scores = tuple(self._scores(row, logits[number]) for number, row in enumerate(batch.rows))
        return Outcome(self._first_tokens(pool, batch, logits[:, -1]), scores)

    def _next_logits(
        self, batch: PrefillBatch, cache: ModelCache, forward_pass: ForwardPass
    ) -> Tensor | None:
        """Read a batch's chunks; return the logits [row, token, vocabulary] of all tokens, or of each row's last, if they are asked for."""
        if any(row.score for row in batch.rows):
            return self._forward(cache, forward_pass, 0)
        if any(row.draws for row in batch.rows):
            return self._forward(cache, forward_pass, 1)
        self._call(self._model.base_model, cache, forward_pass)
        return None

    def _begin_chunk(self, pool: TorchPool, row: PrefillRow) -> None:
        """Clear what a new prompt takes, and let the penalties know its tokens."""
        if row.start == 0:
            pool.sampler.begin(row.slots)
            for layer in pool.cache.layers:
                if row.scratch is None:
                    layer.clear_slot(row.slots[0])
                else:
                    layer.clear_scratch(row.scratch)
        pool.sampler.read_prompt(row.slots, row.token_ids)

    def _place_prompt(self, pool: TorchPool, row: PrefillRow) -> None:
        """Give a prompt that has been read to all its slots."""
        num_held = self._spec.scratch.layout.num_held(row.num_prompt_tokens)
        for layer in pool.cache.layers:
            if row.scratch is None:
                layer.slots.copy(row.slots[0], row.slots[1:])
            else:
                layer.pack(row.scratch, row.slots, row.num_prompt_tokens, row.num_prompt_tokens - num_held)

    def _give_up(self, pool: TorchPool, row: PrefillRow) -> None:
        """Let the prompt's last tokens choose what its scratch, which is full, gives up."""
        assert row.scratch is not None, "only a scratch is outgrown"
        layout, length, end = self._spec.scratch.layout, row.num_prompt_tokens, row.start + len(row.token_ids)
        num_dropped = layout.num_evicted(end, length) - layout.num_evicted(row.start, length)
        self._call(self._model.base_model, pool.cache, look_ahead_pass(row, pool.kinds, layout, self._device))
        for layer in pool.cache.layers:
            layer.shrink(row.scratch, layout.num_held(length), num_dropped, end)

    def _first_tokens(
        self, pool: TorchPool, batch: PrefillBatch, logits: Tensor
    ) -> tuple[tuple[SampledToken, ...], ...]:
        """Draw from the logits [row, vocabulary] of the prompts' last tokens."""
        draws = {slot: draw for row in batch.rows for slot, draw in zip(row.slots, row.draws, strict=False)}
        if not draws:
            return ((),) * len(batch.rows)
        row_of = [0] * pool.spec.num_slots
        for number, row in enumerate(batch.rows):
            for slot in row.slots:
                row_of[slot] = number
        sampled = pool.sampler.sample(
            logits[torch.tensor(row_of, device=self._device)], pool.sampler.plan(draws)
        )
        tokens = steps_to_host([sampled], draws)
        return tuple(tuple(tokens[slot][0] for slot in row.slots) if row.draws else () for row in batch.rows)

    def _pooled(
        self, batch: PrefillBatch, cache: ModelCache, forward_pass: ForwardPass
    ) -> tuple[tuple[float, ...], ...]:
        """Return what each row's tokens, aligned to the right, leave behind the last layer: in float32, as sums of many are asked for."""
        hidden = self._call(
            self._model.base_model, cache, forward_pass
        ).last_hidden_state.float()  # [row, token, hidden]
        chunks = (
            hidden[number, hidden.shape[1] - len(row.token_ids) :] for number, row in enumerate(batch.rows)
        )
        pooled = (
            chunk.sum(0) if row.pooling is PromptPooling.MEAN else chunk[-1]
            for row, chunk in zip(batch.rows, chunks, strict=True)
        )
        return tuple(tuple(vector.tolist()) for vector in pooled)

    def _scores(self, row: PrefillRow, logits: Tensor) -> tuple[SampledToken, ...]:
        """Return the log-probabilities of a chunk's targets from its logits [token, vocabulary], aligned to the right."""
        if row.score is None:
            return ()
        targets, num_top = row.score.target_ids, row.score.num_top
        logits = logits[logits.shape[0] - len(row.token_ids) :]
        scored: list[SampledToken] = []
        for first in range(0, len(targets), _SCORED_AT_ONCE):
            some = torch.tensor(targets[first : first + _SCORED_AT_ONCE], device=self._device)
            found = log_probabilities(logits[first : first + len(some)], some, num_top)
            scored += found.to_host(dict.fromkeys(range(len(some)), num_top)).values()
        return tuple(scored)

    def _decode(self, batch: DecodeBatch) -> Callable[[], Outcome]:
        check_token_ids((row.token_id for row in batch.rows), self._spec.vocab_size)
        pool = self.pools[batch.pool]
        plan = decode_plan(batch, pool.kinds, pool.spec.num_slots, self._spec.max_model_len, self._device)
        draws = {row.slot: row.draw for row in batch.rows}
        draw_plan = pool.sampler.plan(draws, plan.bucket[0])
        steps = self._graphs[batch.pool].run(plan, draw_plan, batch.num_steps) if self._graphs else None
        if steps is None:
            steps = self._decode_unrecorded(batch.pool, plan, draw_plan, batch.num_steps)
        on_host = [step.leave_device() for step in steps]

        def collect() -> Outcome:
            tokens = steps_to_host(on_host, draws)
            return Outcome(tuple(tokens[row.slot] for row in batch.rows))

        return collect

    def _decode_unrecorded(
        self, number_of_pool: int, plan: DecodePlan, draw_plan: DrawPlan, num_steps: int
    ) -> list[Sampled]:
        pool, steps = self.pools[number_of_pool], []
        graphs = self.compiled.steps[number_of_pool] if self.compiled is not None else None
        for number in range(num_steps):
            logits, best = (graphs and graphs.run(plan)) or (self._decode_logits(pool, plan), None)
            steps.append(pool.sampler.sample(logits, draw_plan, number, best))
            plan.advance(steps[-1].token_ids)
        return steps

    def _decode_logits(self, pool: TorchPool, plan: DecodePlan) -> Tensor:
        """Return the logits [slot, vocabulary] of a plan's next step."""
        return self._forward(pool.cache, plan.forward_pass(), 1)[:, -1]


def _result(outcome: Outcome, elapsed: float) -> BatchResult:
    return BatchResult(outcome.tokens, elapsed, outcome.prompt_logprobs, outcome.hidden)


def _failure(error: Exception) -> BackendError:
    """Return what a step's exception means for the scheduler. After a device's own error, CUDA refuses whatever comes next."""
    is_final = isinstance(error, torch.AcceleratorError)
    failure = (BackendUnusableError if is_final else BackendError)(
        f"a step failed: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure
