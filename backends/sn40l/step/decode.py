"""A decode step as kernel calls: operator by operator, fused layers, or one loop over all layers."""

from collections.abc import Iterator

from backends.sn40l.description.model_config import Layer, Model
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.kernels import Call, Kernel, Step, hops, merge, run, total_seconds
from backends.sn40l.step.placement import Placement, fitting, num_sequences, slots_share

_CHOICE_PASSES = 4  # over 32-bit scores of a store's tokens, as in prefill: our guess


def decode_step(deployment: Deployment, shape: DecodeShape) -> Step:
    """Return one step of a static graph, with the fastest split of attention that fits.

    Raises DoesNotFitError.
    """
    placement = decode_placement(deployment, shape)
    calls = _DecodeGraph(deployment, shape, placement).calls()
    return run(calls, deployment.machine, deployment.num_sockets, deployment.call_seconds)


def decode_seconds(deployment: Deployment, shape: DecodeShape) -> float:
    """Return the seconds of `decode_step`, without its events. Raises DoesNotFitError."""
    return min(_seconds(deployment, shape, placement) for placement in fitting(deployment, shape))


def decode_placement(deployment: Deployment, shape: DecodeShape) -> Placement:
    """Return the placement of `decode_step`. Raises DoesNotFitError."""
    return min(fitting(deployment, shape), key=lambda placement: _seconds(deployment, shape, placement))


def _seconds(deployment: Deployment, shape: DecodeShape, placement: Placement) -> float:
    calls = _DecodeGraph(deployment, shape, placement).calls()
    return total_seconds(calls, deployment.machine, deployment.call_seconds)


class _DecodeGraph:
    """The calls of one step."""

    def __init__(self, deployment: Deployment, shape: DecodeShape, placement: Placement) -> None:
        self._model = deployment.model
        self._machine = deployment.machine
        self._num_sockets = deployment.num_sockets
        self._num_nodes = deployment.num_nodes
        self._execution = deployment.execution
        self._shape = shape
        self._sockets_per_sequence = placement.sockets_per_sequence
        self._ddr_share = placement.ddr_weight_share
        self._ddr_slot_share = placement.ddr_slot_share

    def calls(self) -> Iterator[Call]:
        yield Call((self._embedding(),))
        yield from self._layer_calls()
        yield from hops(self._num_nodes, self._num_sockets, 2.0 * self._shape.batch * self._model.hidden_size)
        yield Call((self._classifier(),))
        yield Call((self._sampling(),))

    def _layer_calls(self) -> Iterator[Call]:
        by_kind = [self._layer_kernels(layer) for layer, _ in self._model.kinds]
        if self._execution is Execution.LOOPED:
            yield from (
                Call(tuple(kernel for kind in loop for kernel in by_kind[kind]))
                for loop in _loops(self._model)
            )
            return
        calls = [
            [
                Call((kernel,), self._machine.kernels_per_layer if self._is_split and index == 0 else 1)
                for index, kernel in enumerate(kernels)
            ]
            for kernels in by_kind
        ]
        for kind in self._model.layer_kinds:
            yield from calls[kind]

    @property
    def _is_split(self) -> bool:
        return self._execution is Execution.FUSED

    def _layer_kernels(self, layer: Layer) -> tuple[Kernel, ...]:
        if self._execution is Execution.OPERATORS:
            return tuple(self._operators(layer))
        attention = merge(
            "attention", [self._projections(layer), self._attention(layer), self._router(layer)]
        )
        if layer.experts is None:
            return (merge("layer", [attention, self._ffn(layer)]),)
        return (attention, merge("experts", [self._ffn(layer), self._experts(layer)]))

    def _operators(self, layer: Layer) -> Iterator[Kernel]:
        """Yield the eleven calls of a layer without fusion."""
        batch = self._shape.batch
        hidden = self._model.hidden_size
        sockets = self._num_sockets
        attention = layer.attention
        precision = self._model.precision
        row = 2.0 * batch * hidden
        entries = attention.num_entries(self._shape.capacity)
        num_stored = self._shape.num_stored(attention)
        num_attended = entries - num_stored + self._shape.num_chosen(attention)
        scores, attended = (
            2.0 * batch * attention.num_heads * count / sockets for count in (entries, num_attended)
        )
        half = self._attention(layer)
        for name, spilled in (
            ("norm", 2 * row),
            ("rotary", 2 * row / sockets),
            ("add norm", 3 * row),
            ("add", 3 * row),
        ):
            yield Kernel(name, activation_bytes=spilled)
        yield self._product(
            "queries keys values",
            attention.input_params * precision.attention,
            attention.input_params,
            2 * row,
        )
        for name, spilled in (("scores", scores), ("values", attended)):
            yield Kernel(
                name,
                cache_bytes=half.cache_bytes / 2,
                ddr_bytes=half.ddr_bytes / 2,
                gather_bytes=half.gather_bytes / 2,
                activation_bytes=spilled,
                attention_operations=half.attention_operations / 2,
                attention_efficiency=half.attention_efficiency,
            )
        yield Kernel("softmax", activation_bytes=2 * attended)
        yield self._product(
            "output",
            attention.output_params * precision.attention,
            attention.output_params,
            2 * row,
            num_collectives=1,
        )
        if layer.experts is None:
            yield self._product(
                "gate up", layer.ffn_params * precision.ffn * 2 / 3, layer.ffn_params * 2 // 3, 3 * row
            )
            yield self._product(
                "down",
                layer.ffn_params * precision.ffn / 3,
                layer.ffn_params // 3,
                2 * row,
                num_collectives=1,
            )
        else:
            yield self._router(layer)
            yield merge("experts", [self._ffn(layer), self._experts(layer)])

    def _projections(self, layer: Layer) -> Kernel:
        params = layer.attention.input_params + layer.attention.output_params
        return self._product(
            "projections", params * self._model.precision.attention, params, num_collectives=1
        )

    def _router(self, layer: Layer) -> Kernel:
        params = layer.experts.router_params if layer.experts else 0
        return self._product("router", params * self._model.precision.embedding, params)

    def _ffn(self, layer: Layer) -> Kernel:
        return self._product(
            "ffn", layer.ffn_params * self._model.precision.ffn, layer.ffn_params, num_collectives=1
        )

    def _experts(self, layer: Layer) -> Kernel:
        """All chosen experts in one kernel.

        A static loop has a trip for each one that the batch could choose.
        """
        experts = layer.experts
        assert experts is not None
        batch = self._shape.batch
        touched = (
            experts.most_touched(batch)
            if self._machine.reads_possible_experts
            else experts.expected_touched(batch)
        )
        weight_bytes = touched * experts.expert_params * self._model.precision.experts
        # The shared part's all-reduce carries the experts' sums as well.
        return self._product(
            "experts", weight_bytes, experts.num_chosen * experts.expert_params, is_routed=True
        )

    def _attention(self, layer: Layer) -> Kernel:
        attention = layer.attention
        shape = self._shape
        split = self._sockets_per_sequence
        entries = attention.num_entries(shape.capacity)
        num_stored = shape.num_stored(attention)
        num_chosen = shape.num_chosen(attention)
        share = slots_share(attention, shape, self._num_sockets, split)
        sequences = num_sequences(shape.batch, self._num_sockets, split)
        heads = -(-attention.num_heads // split)
        products = attention.score_width * entries
        products += (attention.decode_width - attention.score_width) * (entries - num_stored + num_chosen)
        operations = 2.0 * sequences * heads * products
        # Of a store, all keys are read, and the values of few tokens are gathered. A latent is both.
        key_share = attention.key_width / attention.cache_width
        keys = num_stored * attention.stored_bytes * key_share
        values = 1.0 if attention.key_width == attention.cache_width else 1 - key_share
        gathered = num_chosen * attention.stored_bytes * values
        choosing = _CHOICE_PASSES * 4.0 * attention.num_kv_heads * num_stored
        exact = (entries - num_stored) * attention.cache_width * self._model.precision.cache
        cache_bytes = shape.batch * (exact + keys) * share
        gather_bytes = shape.batch * gathered * share
        in_hbm = 1 - self._ddr_slot_share
        return Kernel(
            "attention",
            cache_bytes=cache_bytes * in_hbm,
            gather_bytes=gather_bytes * in_hbm + shape.batch * choosing * share,
            ddr_bytes=(cache_bytes + gather_bytes) * self._ddr_slot_share,
            attention_operations=operations * (1 + self._machine.pipeline_fill / sequences),
            attention_efficiency=self._machine.decode_attention_efficiency,
        )

    def _embedding(self) -> Kernel:
        return Kernel(
            "embedding",
            activation_bytes=self._shape.batch * self._model.hidden_size * self._model.precision.embedding,
        )

    def _classifier(self) -> Kernel:
        params = self._model.embedding_params
        return self._product("classifier", params * self._model.precision.embedding, params)

    def _sampling(self) -> Kernel:
        return Kernel(
            "sampling", activation_bytes=4.0 * self._shape.batch * self._model.vocab_size / self._num_sockets
        )

    def _product(
        self,
        name: str,
        weight_bytes: float,
        params: int,
        activation_bytes: float = 0.0,
        *,
        num_collectives: int = 0,
        is_routed: bool = False,
    ) -> Kernel:
        """Return a tensor-parallel product of `params` weights with every token of the batch."""
        sockets = self._num_sockets
        num_collectives = num_collectives if sockets > 1 else 0
        # A ring all-reduce of 16-bit values: each socket sends them twice, but for its own share.
        sent = 2 * (sockets - 1) / sockets * 2.0 * self._shape.batch * self._model.hidden_size
        return Kernel(
            name,
            weight_bytes=weight_bytes * (1 - self._ddr_share) / sockets,
            ddr_bytes=weight_bytes * self._ddr_share / sockets,
            activation_bytes=activation_bytes,
            gemm_operations=2.0 * params * self._shape.batch / sockets,
            link_bytes=sent * num_collectives,
            num_collectives=num_collectives,
            awaits_router=is_routed,
            loops_inside=is_routed,
        )


def _loops(model: Model) -> Iterator[tuple[int, ...]]:
    """Yield the kinds of each loop's layers.

    Leading dense layers are one loop, all others, of one pattern, another.
    """
    kinds = model.layer_kinds
    has_experts = [model.kinds[kind][0].experts is not None for kind in kinds]
    num_leading = has_experts.index(True) if any(has_experts) else 0
    if num_leading and all(has_experts[num_leading:]):
        yield kinds[:num_leading]
        yield kinds[num_leading:]
    else:
        yield kinds
