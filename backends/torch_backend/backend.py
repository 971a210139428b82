"""The torch backend: a transformers model on a CPU or a CUDA device, decoding over SnapStream slots."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.clock import Clock, WallClock
from backends.errors import ModelLoadError
from backends.interface import (
    BackendSpec,
    BackendUnusableError,
    Batch,
    CodeState,
    DecodeBatch,
    DecodeRow,
    Draw,
    Importance,
    Pending,
    PrefillBatch,
    PrefillRow,
    PrefillShape,
    SamplingParams,
    ScratchSpec,
)
from backends.torch_backend.compiled.code import CompiledCode, load_built_kernels
from backends.torch_backend.compiled.trust import UntrustedError, make_private
from backends.torch_backend.config import Quantization, TorchBackendConfig
from backends.torch_backend.cuda_graphs import CudaRecorder, DecodeGraphs, Recorder
from backends.torch_backend.forward.cache import ModelCache
from backends.torch_backend.forward.last_layer import shorten_last_layer
from backends.torch_backend.forward.plan import (
    MIN_ROWS,
    DecodePlan,
    decode_plan,
    idle_plans,
    verifying_plan,
)
from backends.torch_backend.forward.stand_in import decoder_layers
from backends.torch_backend.memory import with_sizes
from backends.torch_backend.model.induction import INDUCTION_CACHE, induction_scores
from backends.torch_backend.model.loading import resolve_device
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.native.kernels import Kernels, kernels_are_supported
from backends.torch_backend.pending import DecodedSteps, Finished, Output, Running, failure
from backends.torch_backend.pool import TorchPool, allocate_scratches
from backends.torch_backend.prefill import Prefill
from backends.torch_backend.prefix_archive import FileArchive
from backends.torch_backend.prefix_store import PrefixStore, prefix_spec
from backends.torch_backend.preparation import PreparedModel, prepare_model
from backends.torch_backend.refusals import (
    check_cache_dtypes,
    check_draft,
    check_stores,
    without_prefixes,
)
from backends.torch_backend.sampling.logprobs import Sampled
from backends.torch_backend.sampling.sampler import DrawPlan, check_token_ids
from backends.torch_backend.spec import (
    backend_spec,
    layer_kinds,
    most_slot_entries,
    pool_spec,
    scratch_layout,
    with_layer_budgets,
)
from backends.torch_backend.torch_private import lacks_interfaces
from backends.torch_backend.verification import VerifiedDrafts, most_draft_tokens, with_drafts
from cache.policy import CachePolicy

logger = logging.getLogger(__name__)


class TorchBackend:
    """Runs prefill and decode steps of one model, with one set of slots for each pool."""

    def __init__(
        self,
        config: TorchBackendConfig,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        """Load the model, adapt and probe it, build the pools, and prepare recorded or compiled decode.

        A `recorder` records the decode steps. Without one they become CUDA graphs if the config compiles for
        CUDA. With a `model`, no model is loaded: it must have been loaded with `ATTENTION_NAME`, and its
        modules are replaced.

        Raises ModelLoadError for a model that cannot be served, and ValueError for sizes that do not fit
        together.
        """
        self._clock = clock or WallClock()
        self._kernels = Kernels(can_quantize=_loads_quantising_kernels(config))
        prepared = prepare_model(config, self._kernels, model, has_recorder=recorder is not None)
        self._model, layers, max_model_len = prepared.model, prepared.layers, prepared.max_model_len
        self._device = self._model.device
        self._recorder = recorder or _default_recorder(config, self._device)
        check_cache_dtypes(config, layers, self._model)
        check_draft(config, layers, max_model_len)
        check_stores(config, layers, self._model)
        config = without_prefixes(config, layers, self._model.config.model_type)
        config = with_sizes(config, layers, max_model_len, self._device)
        policies = _resolve_policies(config, prepared)
        self.pools, scratch = _build_pools(
            config,
            self._model,
            layers,
            policies,
            max_model_len,
            self._kernels,
            # A recorded step has one row for each of the first slots.
            verifies_drafts=self._device.type == "cpu" and self._recorder is None,
        )
        specs = tuple(pool.spec for pool in self.pools)
        kind = config.prefix_cache_dtype
        prefixes = prefix_spec(config.prefix_cache_bytes or 0, layers, kind)
        self.prefixes = PrefixStore(prefixes, layers, self._device, kind) if prefixes is not None else None
        self._archive = self._open_archive(config, prepared.fingerprint)
        self._spec = backend_spec(config, self._model.config, max_model_len, specs, scratch, prefixes)
        self._prefill = Prefill(self._model, self._spec, self.prefixes)
        self._requires_compiled = config.require_compiled
        self._compile_cache = config.compile_cache
        self._graphs: tuple[DecodeGraphs, ...] = ()
        self.compiled = self._compiled_code(config)
        has_code = self.compiled is not None or self._recorder is not None
        is_compiled = has_code and not config.is_draft  # which does not decode
        num_prefix_bytes = self.prefixes.num_bytes if self.prefixes is not None else 0
        description = _description(
            self._model, prepared.num_parameters, self.pools, num_prefix_bytes, is_compiled=is_compiled
        )
        self._spec = replace(self._spec, description=description)
        if not any(layer.readers for layer in layers) and layers[-1].attends and not layers[-1].states:
            # Last, so that it is the outermost of the modules that replace the last layer.
            shorten_last_layer(self._model)

    def _compiled_code(self, config: TorchBackendConfig) -> CompiledCode | None:
        """Return the code of compiled decode on a CPU, if it is configured and possible.

        Logs a warning if this torch lacks interfaces that the backend was written for.
        """
        if self._device.type != "cpu":
            return None
        if lacks_interfaces(for_compiling=False) or not config.compile:
            return None
        if not kernels_are_supported():
            logger.warning("decode runs uncompiled: this processor lacks AVX2 with FMA")
            return None
        pools = () if config.is_draft else self.pools
        return CompiledCode(
            config.compile_cache, self._model, pools, self._spec.max_model_len - 1, self._kernels
        )

    @property
    def spec(self) -> BackendSpec:
        return self._spec

    @property
    def code(self) -> CodeState:
        if self.compiled is not None:
            return self.compiled.state
        if self._recorder is None:
            return CodeState.PLAIN
        return CodeState.COMPILED if self.num_recorded else CodeState.FAILED

    @property
    def num_recorded(self) -> int:
        """How many functions of decode steps were recorded; none are after the warm-up."""
        return sum(graphs.num_recorded for graphs in self._graphs)

    @property
    def prefix_archive(self) -> FileArchive | None:
        return self._archive

    def _open_archive(self, config: TorchBackendConfig, fingerprint: str) -> FileArchive | None:
        """Raises ValueError if there is a folder for blocks, but no memory or no right to write."""
        if config.prefix_cache_dir is None:
            return None
        if self.prefixes is None:
            raise ValueError("prefix_cache_dir needs prefix_cache_bytes for at least one block")
        if config.prefix_cache_dtype.is_rounded:
            fingerprint += f"-{config.prefix_cache_dtype}"
        return FileArchive(
            config.prefix_cache_dir, config.prefix_cache_disk_bytes, fingerprint, self.prefixes
        )

    def warmup(self) -> None:
        """Read chunks and decode once in each pool, then record decode.

        Decode is compiled later, in idle time, or at once if the config requires it. Raises `ModelLoadError`
        if it then cannot be.

        No slot holds anything yet, and every prompt clears its slots first.
        """
        draw = Draw(SamplingParams(temperature=0.0))
        shapes = self._warmup_shapes()
        for index, pool in enumerate(self._spec.pools):
            if pool.num_slots == 0:
                self._warm_up_scoring(index)
                continue
            for shape, scratch in [(shapes[0], 0), *((shape, None) for shape in shapes)]:
                chunk = (0,) * min(shape.num_tokens, pool.max_direct_tokens)
                row = PrefillRow("warmup", chunk, 0, len(chunk), slots=(0,), scratch=scratch, draws=(draw,))
                self.submit(PrefillBatch((row,), shape, index)).result()
            self.submit(DecodeBatch((DecodeRow("warmup", 0, 0, 1, 1, draw),), pool=index)).result()
        if self._recorder is not None:
            self._graphs = tuple(self._record(pool, self._recorder) for pool in self.pools)
        if self.compiled is not None:
            self.compiled.start()
        if self._requires_compiled:
            if self.compiled is not None:
                self._await_code(self.compiled)
            if self.code is not CodeState.COMPILED:
                raise ModelLoadError(f"require_compiled: decode is not compiled ({self.code}); see the log")

    @staticmethod
    def _await_code(code: CompiledCode) -> None:
        """Raises `ModelLoadError` if the weights can no longer be used."""
        try:
            code.wait()
        except BackendUnusableError as error:
            raise ModelLoadError(f"require_compiled: {error}") from error

    def _warmup_shapes(self) -> list[PrefillShape]:
        """Return the shapes of the chunks that the warm-up reads.

        CUDA selects kernels for each. A CPU keeps nothing of a shape, so there they are the shortest and, for
        the graph of several rows, the one with the most.
        """
        shapes = self._spec.prefill_shapes
        if self._device.type != "cpu":
            return list(shapes)
        return [shapes[0], max(shapes, key=lambda shape: shape.num_rows)]

    def _warm_up_scoring(self, pool: int) -> None:
        """Read chunks in a pool without slots."""
        for shape in self._warmup_shapes():
            chunk = (0,) * shape.num_tokens
            row = PrefillRow("warmup", chunk, 0, len(chunk), (), scratch=0, importance=Importance())
            self.submit(PrefillBatch((row,), shape, pool)).result()

    def use_idle_time(self) -> bool:
        return self.compiled is not None and self.compiled.proceed()

    def submit(self, batch: Batch) -> Pending:
        """Start a step. On a CPU it also ends here. Any error is raised by the pending step's `result`."""
        # A compiler process works beside the server. Between two steps is where its code may be taken over:
        # no step then mixes compiled and uncompiled layers.
        if self.compiled is not None:
            self.compiled.poll()
        started = self._clock.now()
        is_repeatable = True
        try:
            with torch.inference_mode():
                for store in batch.slot_stores:
                    if self.prefixes is not None:
                        self.prefixes.store_slot(self.pools[store.pool], store)
                output: Output
                if isinstance(batch, PrefillBatch):
                    output = self._prefill.run(self.pools[batch.pool], batch)
                elif batch.num_draft_tokens:
                    output = self._verify(batch)
                else:
                    is_repeatable = self._is_repeatable(batch.pool)
                    output = self._decode(batch)
                    is_repeatable = False  # all its steps have run
                # Kernels of a CUDA step are only queued. The event lets the scheduler prepare the next step
                # while they run, and wait for this step alone.
                if self._device.type == "cuda":
                    ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    ended.record(torch.cuda.current_stream(self._device))
                    return Running(self._clock, started, ended.synchronize, output)
            return Finished(output.collect().result(self._clock.now() - started))
        except Exception as error:
            return Finished(failure(error, is_repeatable=is_repeatable))

    def _is_repeatable(self, pool: int) -> bool:
        """Return whether a decode step that failed can be run again.

        It writes the same token to the same entry. But a store already has the token that was in the entry
        before, a state may have advanced, and the number of recorded steps that have run is unknown.
        """
        has_states = any(layer.slots.states for layer in self.pools[pool].cache.layers)
        return self.pools[pool].spec.policy.store is None and not has_states and not self._graphs

    def close(self) -> None:
        """Free the device's memory."""
        if self.compiled is not None:
            self.compiled.close()
        if self._archive is not None:
            self._archive.close()
        del self._model, self._prefill, self._archive, self.prefixes, self.pools, self._graphs, self._recorder
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _record(self, pool: TorchPool, recorder: Recorder) -> DecodeGraphs:
        """Record the pool's decode steps, one graph for each of the shapes that a plan may have."""
        limits = pool.spec.num_slots, self._spec.max_model_len, self._spec.max_decode_steps
        plans = idle_plans(pool.kinds, *limits, self._device)
        graphs = DecodeGraphs(lambda plan: self._decode_logits(pool, plan), pool.sampler, plans)
        with self._compiled_layers(pool):
            graphs.record(recorder)
        return graphs

    @contextmanager
    def _compiled_layers(self, pool: TorchPool) -> Iterator[None]:
        """Compile the model's layers on a GPU, for the steps that are captured meanwhile."""
        if self._device.type == "cpu":
            yield
            return
        from backends.torch_backend.torch_private.dynamo import compiled_layers

        folder = self._compile_cache / "cuda"
        try:
            make_private(folder)
        except (OSError, UntrustedError) as error:
            logger.warning("captured steps run uncompiled, which is slower: %s", error)
            yield
            return
        with compiled_layers(decoder_layers(self._model), pool.cache, ModelCache.CALLED_BY_LAYERS, folder):
            yield

    def _decode(self, batch: DecodeBatch) -> DecodedSteps:
        """Run the batch's steps, recorded ones if there are any for the plan's shape."""
        check_token_ids((row.token_id for row in batch.rows), self._spec.vocab_size)
        pool = self.pools[batch.pool]
        pool.will_decode(batch)
        min_rows = MIN_ROWS if self.compiled is None else self.compiled.steps[batch.pool].min_rows
        row_limits = min_rows, pool.spec.num_slots
        plan = decode_plan(batch, pool.kinds, row_limits, self._spec.max_model_len, self._device)
        draws = {row.slot: row.draw for row in batch.rows}
        draw_plan = pool.sampler.plan(draws, plan.bucket[0])
        steps = self._graphs[batch.pool].run(plan, draw_plan, batch.num_steps) if self._graphs else None
        if steps is None:
            steps = self._decode_unrecorded(batch.pool, plan, draw_plan, batch.num_steps)
        return DecodedSteps([step.leave_device() for step in steps], draws)

    def _decode_unrecorded(
        self, pool_index: int, plan: DecodePlan, draw_plan: DrawPlan, num_steps: int
    ) -> list[Sampled]:
        """Run decode steps with the compiled code of the pool if it is ready, else with the model itself.

        Where a step after the first one fails, return those before it: the next launch begins with it.
        """
        pool = self.pools[pool_index]
        graphs = self.compiled.steps[pool_index] if self.compiled is not None else None
        steps: list[Sampled] = []
        for step in range(num_steps):
            try:
                if graphs is not None and graphs.are_used:
                    logits, best = graphs.run(plan)
                    sampled = pool.sampler.sample(logits, draw_plan, step, best)
                else:
                    sampled = pool.sampler.sample(self._decode_logits(pool, plan), draw_plan, step)
            except Exception as error:
                if not steps or not self._is_repeatable(pool_index):
                    raise
                logger.warning("a step of a launch failed, and begins the next one: %s", error)
                break
            steps.append(sampled)
            plan.advance(sampled.token_ids)
        return steps

    def _verify(self, batch: DecodeBatch) -> VerifiedDrafts:
        """Run one step that reads the drafts of a batch too, as further rows of their slots."""
        rows = with_drafts(batch)
        check_token_ids((row.token_id for row in rows), self._spec.vocab_size)
        pool = self.pools[batch.pool]
        pool.will_decode(batch)
        plan = verifying_plan(rows, pool.kinds, self._spec.max_model_len, self._device)
        draw_plan = pool.sampler.verifying_plan([(row.slot, row.draw) for row in rows])
        graphs = self.compiled.steps[batch.pool] if self.compiled is not None else None
        if graphs is not None and graphs.are_used:
            drawn = pool.sampler.verify(*graphs.run(plan), draw_plan)
        else:
            drawn = pool.sampler.verify(self._decode_logits(pool, plan), None, draw_plan)
        return VerifiedDrafts(batch, drawn)

    def _decode_logits(self, pool: TorchPool, plan: DecodePlan) -> Tensor:
        """Return the logits [slot, vocabulary] of a plan's next step."""
        logits: Tensor = self._model(**plan.forward_pass().arguments(pool.cache), logits_to_keep=1).logits
        return logits[:, -1]


def _loads_quantising_kernels(config: TorchBackendConfig) -> bool:
    """Load kernels that are there already to quantise weights. Return whether there are any."""
    if config.quantization is not Quantization.INT4 or resolve_device(config.device).type != "cpu":
        return False
    if config.compile and kernels_are_supported() and load_built_kernels(config.compile_cache):
        return True
    logger.info("weights are quantised without the kernels: about 30 s a billion, instead of 3 s")
    return False


def _description(
    model: PreTrainedModel,
    num_parameters: int,
    pools: Sequence[TorchPool],
    num_prefix_bytes: int,
    *,
    is_compiled: bool,
) -> str:
    """Return the size, the type and the device of a loaded model, and the memory of its slots."""
    slots = sum(layer.slots.num_bytes for pool in pools for layer in pool.cache.layers) / 1e6
    dtype = str(model.dtype).removeprefix("torch.")
    decode = "compiled" if is_compiled else "uncompiled"
    stored = f", {num_prefix_bytes / 1e6:.0f} MB for stored prompts" if num_prefix_bytes else ""
    return (
        f"{num_parameters / 1e6:.0f} M parameters in {dtype} on {model.device.type}, {decode}, "
        f"{slots:.0f} MB of slots{stored}"
    )


def _default_recorder(config: TorchBackendConfig, device: torch.device) -> Recorder | None:
    """Return the recorder of CUDA graphs if the config compiles for CUDA, else None."""
    records = config.compile and not config.is_draft and device.type == "cuda"
    return CudaRecorder(device) if records else None


def _resolve_policies(config: TorchBackendConfig, prepared: PreparedModel) -> list[CachePolicy]:
    """Return each pool's policy, with layer budgets by the model's induction scores where configured."""
    layers, max_model_len = prepared.layers, prepared.max_model_len
    policies = [options.policy.resolve(max_model_len) for options in config.pools]
    if not any(options.policy.measures_layers for options in config.pools):
        return policies
    measured = induction_scores(
        prepared.model, len(layers), max_model_len, prepared.scores_name, INDUCTION_CACHE
    )
    most_entries = most_slot_entries(policies, max_model_len, config.scratch_capacity)
    return [
        with_layer_budgets(
            policy, layers, measured, max_model_len, most_entries, has_leader=options.policy.has_leading_layer
        )
        if options.policy.measures_layers
        else policy
        for policy, options in zip(policies, config.pools, strict=True)
    ]


def _build_pools(
    config: TorchBackendConfig,
    model: PreTrainedModel,
    layers: Sequence[LayerSpec],
    policies: Sequence[CachePolicy],
    max_model_len: int,
    kernels: Kernels,
    *,
    verifies_drafts: bool,
) -> tuple[tuple[TorchPool, ...], ScratchSpec]:
    """Allocate the scratches, which all pools share, and each pool's slots."""
    kinds = [layer_kinds(policy, layers, max_model_len) for policy in policies]
    distinct_kinds = [kind for pool_kinds in kinds for kind in dict.fromkeys(pool_kinds)]
    layout = scratch_layout(config.scratch_capacity, max_model_len, config.prefill_chunk, distinct_kinds)
    scratches = allocate_scratches(layout, config.num_scratch, layers, model.device)
    pools = []
    for options, policy, pool_kinds in zip(config.pools, policies, kinds, strict=True):
        spec = pool_spec(options, policy, pool_kinds, max_model_len)
        if verifies_drafts and not any(layer.states for layer in layers):  # no state can be taken back
            spec = replace(spec, max_draft_tokens=most_draft_tokens(spec))
        pools.append(TorchPool.build(spec, pool_kinds, layers, scratches, model.config.vocab_size, kernels))
    return tuple(pools), ScratchSpec(config.num_scratch, layout)
