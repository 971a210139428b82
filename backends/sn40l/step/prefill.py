"""Prefill of a prompt at batch 1 as kernel calls (arXiv 2511.03092, section 4).

Products are fused, attention runs in tiles, and SnapStream has kernels. Products and heads are split over the
sockets, activations over the sequence. Activations are gathered before the projections and before the router,
which sends them to their experts, and scattered after the output projection. The experts' sums are streamed
by tile during the computation.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from backends.sn40l.description.model_config import Attention, Layer
from backends.sn40l.step.deployment import Deployment, Execution
from backends.sn40l.step.kernels import Call, Kernel, Step, hops, merge, run, total_seconds

_OBSERVATION_WINDOW = 64  # assumption, 32 to 128: the paper does not publish its own


@dataclass(frozen=True, slots=True)
class Compression:
    """The compression at a prompt's end, in tokens: the ring is gathered, the best candidates are kept.

    With neither, `observation_window` queries only score the prompt. `num_stored` tokens are quantised into a
    store.
    """

    num_recent: int
    num_kept: int
    observation_window: int = _OBSERVATION_WINDOW
    num_stored: int = 0

    @property
    def has_scores(self) -> bool:
        return self.num_kept > 0 or self.num_recent == 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + num_tokens` of a prompt.

    A long prompt is compressed after its last chunk.
    """

    num_tokens: int
    start: int = 0
    compression: Compression | None = None

    def num_pairs(self, tile: int) -> float:
        """Return the number of query-key pairs in tiles. A block of queries meets all keys up to its end."""
        full, rest = divmod(self.num_tokens, tile)
        blocks = tile * (full * self.start + tile * full * (full + 1) // 2)
        return float(blocks + rest * (self.start + self.num_tokens))


def prefill_step(deployment: Deployment, chunk: Chunk) -> Step:
    """Return the step that reads one chunk."""
    calls = _PrefillGraph(deployment, chunk).calls()
    return run(calls, deployment.machine, deployment.num_sockets, deployment.call_seconds)


def prefill_seconds(deployment: Deployment, chunk: Chunk) -> float:
    """Return the seconds of `prefill_step`, without its events."""
    calls = _PrefillGraph(deployment, chunk).calls()
    return total_seconds(calls, deployment.machine, deployment.call_seconds)


class _PrefillGraph:
    """The calls of one chunk."""

    def __init__(self, deployment: Deployment, chunk: Chunk) -> None:
        self._model = deployment.model
        self._machine = deployment.machine
        self._num_sockets = deployment.num_sockets
        self._num_nodes = deployment.num_nodes
        self._execution = deployment.execution
        self._chunk = chunk
        self._num_pairs = chunk.num_pairs(self._machine.attention_tile)
        self._activations = 2.0 * chunk.num_tokens * self._model.hidden_size

    def calls(self) -> Iterator[Call]:
        calls = [tuple(self._layer_calls(layer)) for layer, _ in self._model.kinds]
        for kind in self._model.layer_kinds:
            yield from calls[kind]
        yield from hops(self._num_nodes, self._num_sockets, self._activations)
        params = self._model.embedding_params
        yield Call((self._product("classifier", params, self._model.precision.embedding, num_tokens=1),))

    def _layer_calls(self, layer: Layer) -> Iterator[Call]:
        kernels = tuple(self._kernels(layer))
        if self._execution is Execution.OPERATORS:
            yield from (Call((kernel,)) for kernel in (*kernels, *self._spills(layer)))
        elif layer.experts is None:
            yield Call(
                (merge("layer", [kernel for kernel in kernels if not kernel.gather_bytes]),),
                self._machine.kernels_per_layer,
            )
            yield from (Call((kernel,)) for kernel in kernels if kernel.gather_bytes)
        else:
            yield from (Call((kernel,)) for kernel in kernels)

    def _kernels(self, layer: Layer) -> Iterator[Kernel]:
        attention = layer.attention
        precision = self._model.precision
        yield self._product("projections", attention.input_params, precision.attention, num_exchanges=1)
        compression = self._chunk.compression
        if compression and attention.window is None:
            if compression.num_recent:
                yield self._ring(layer, compression)
            if compression.has_scores:
                yield self._selection(layer, compression)
            if compression.num_stored:
                yield self._quantization(attention, compression)
        yield self._attention(layer)
        yield self._product("output", attention.output_params, precision.attention, num_exchanges=1)
        if layer.experts is None:
            yield self._product("ffn", layer.ffn_params, precision.ffn, is_streamed=True)
            return
        experts = layer.experts
        yield self._product("router", experts.router_params, precision.embedding, num_exchanges=2)
        touched = experts.most_touched(self._chunk.num_tokens)
        shared = self._product("shared", layer.ffn_params, precision.ffn)
        routed = self._product(
            "routed", experts.num_chosen * experts.expert_params, precision.experts, is_streamed=True
        )
        weight_bytes = (
            layer.ffn_params * precision.ffn + touched * experts.expert_params * precision.experts
        ) / self._num_sockets
        operations = shared.gemm_operations + routed.gemm_operations
        yield Kernel(
            "experts",
            weight_bytes=weight_bytes,
            gemm_operations=operations,
            link_bytes=routed.link_bytes,
            loops_inside=True,
        )

    def _product(
        self,
        name: str,
        params: int,
        width: float,
        *,
        num_tokens: int | None = None,
        num_exchanges: int = 0,
        is_streamed: bool = False,
    ) -> Kernel:
        """Return a product of `params` weights of `width` bytes with every token.

        The activations are exchanged first, in the given number of collectives.
        """
        sockets = self._num_sockets
        sent = (
            self._activations * (sockets - 1) / sockets
        )  # what passes a socket's links when activations are gathered or scattered
        return Kernel(
            name,
            weight_bytes=params * width / sockets,
            gemm_operations=2.0
            * params
            * (self._chunk.num_tokens if num_tokens is None else num_tokens)
            / sockets,
            exchange_bytes=sent * num_exchanges,
            link_bytes=sent if is_streamed else 0.0,
        )

    def _attention(self, layer: Layer) -> Kernel:
        attention = layer.attention
        end = self._chunk.start + self._chunk.num_tokens
        pairs = self._num_pairs
        if attention.window is not None:
            pairs = min(pairs, self._chunk.num_tokens * (attention.window + self._machine.attention_tile))
        head_share = -(-attention.num_heads // self._num_sockets) / attention.num_heads
        return Kernel(
            "attention",
            cache_bytes=2.0 * attention.expanded_width * end / self._num_sockets,
            attention_operations=2.0 * attention.num_heads * attention.prefill_width * pairs * head_share,
            attention_efficiency=self._machine.prefill_attention_efficiency,
            loops_inside=True,
        )

    def _ring(self, layer: Layer, compression: Compression) -> Kernel:
        """Two gathers of keys and values, before and after the wrap, and one selection between them."""
        gathered = 3 * 2.0 * compression.num_recent * layer.attention.expanded_width
        return Kernel("ring", gather_bytes=gathered / self._num_sockets)

    def _selection(self, layer: Layer, compression: Compression) -> Kernel:
        """Score the candidates and gather the best.

        Scoring makes four passes over 32-bit scores: product, softmax, sum and pooling.
        """
        candidates = max(self._chunk.start + self._chunk.num_tokens - compression.num_recent, 0)
        keys = 2.0 * candidates * layer.attention.expanded_width / 2
        scores = 4 * 4.0 * layer.attention.num_heads * compression.observation_window * candidates
        kept = 2 * 2.0 * compression.num_kept * layer.attention.expanded_width
        return Kernel("selection", gather_bytes=(keys + scores + kept) / self._num_sockets)

    def _quantization(self, attention: Attention, compression: Compression) -> Kernel:
        """Read the tokens that do not fit the ring, and write them into the store."""
        read = attention.cache_width * self._model.precision.cache
        moved = compression.num_stored * (read + attention.stored_bytes)
        return Kernel("store", gather_bytes=moved / self._num_sockets)

    def _spills(self, layer: Layer) -> Iterator[Kernel]:
        """Yield the kernels that fusion removes: element-wise operators, and three passes over the scores."""
        row = self._activations / self._num_sockets
        for name in ("norm", "rotary", "add norm", "activation", "add"):
            yield Kernel(name, activation_bytes=3 * row)
        scores = 2.0 * layer.attention.num_heads * self._num_pairs / self._num_sockets
        yield Kernel("softmax", activation_bytes=4 * scores)
        yield Kernel("values", activation_bytes=scores)
