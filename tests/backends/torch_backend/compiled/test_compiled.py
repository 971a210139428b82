"""Compiled decode: how it comes about, when it is used, and how exact it is.

That its tokens are right is shown in `test_exact_*`.
"""

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from backends.interface import BackendUnusableError, CodeState
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.compiled.build import code_folder
from backends.torch_backend.compiled.code import CompiledCode, _as_traced
from backends.torch_backend.compiled.layer_function import LayerFunction
from backends.torch_backend.compiled.layers import DecodeCall, GraphedLayer
from backends.torch_backend.compiled.trace import GraphError, GraphSource, InputSpec, chain, trace
from backends.torch_backend.config import DeviceName, DtypeName, Quantization, TorchBackendConfig
from backends.torch_backend.errors import ModelLoadError
from backends.torch_backend.forward.cache import ModelCache
from backends.torch_backend.forward.stand_in import LayerCall
from backends.torch_backend.forward.step import KindStep
from backends.torch_backend.model.attention import grouped_attention
from backends.torch_backend.model.grouped_linear import GroupedLinear
from backends.torch_backend.model.quantized_linear import QuantizedLinear
from backends.torch_backend.native.kernels import kernels_are_supported, load_kernels
from backends.torch_backend.torch_private import onednn
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from cache.scorer import WindowScorer
from commands.eval.options import EVAL_MODEL
from server.options.models import DEMO_MODEL
from tests.backends.checkpoints import load_oracle, save_checkpoint
from tests.backends.driver import GREEDY, Driver, Request
from tests.backends.kernels import copy_kernels
from tests.backends.oracle import random_prompt

pytestmark = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")

# The graphs of layers are those of `test_contract`, too.
POLICY = PolicyOptions(num_sink=2, num_recent=12, num_kept=18, scorer=WindowScorer(observation_window=4))
CONSTANT = torch.ones(4)
ROWS = InputSpec(("rows", 4), "float32")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, compile_cache: Path) -> TorchBackendConfig:
    path = save_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=3)
    return TorchBackendConfig(
        str(path),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        pools=(PoolOptions(8, POLICY),),
        max_model_len=256,
        prefill_chunk=32,
        compile=True,
        compile_cache=compile_cache,
    )


def _compiled(backend: TorchBackend) -> CompiledCode:
    assert backend.compiled is not None
    return backend.compiled


def _proceed(backend: TorchBackend) -> None:
    """Do all the work that waits for idle time."""
    while backend.use_idle_time():
        pass


def _start_to_build(backend: TorchBackend) -> None:
    while _compiled(backend)._process is None:
        assert backend.use_idle_time()


def _take_kernels_alone(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels be those of a package, and no graph be compiled."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("backends.torch_backend.compiled.code.packaged_kernels", lambda: built)


def _refuse_layers(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no layer of the model be called itself."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a layer is called")

    for layer in backend._model.modules():
        if isinstance(layer, GraphedLayer):
            monkeypatch.setattr(layer.layer, "forward", refuse)


def _is_compiled(backend: TorchBackend) -> list[bool]:
    """Return whether each pool's steps run as graphs."""
    return [step.are_used for step in _compiled(backend).steps]


@pytest.mark.usefixtures("cold_builder")
@pytest.mark.long
def test_requests_are_served_while_code_is_compiled(
    config: TorchBackendConfig, tmp_path: Path, built_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first start compiles, a second one finds all code, and no request waits."""
    folder = code_folder(tmp_path)
    copy_kernels(built_kernels, folder)  # they take the longest
    unfinished = folder / "build" / "unfinished.so"  # of a process that was killed
    unfinished.parent.mkdir()
    unfinished.touch()
    backend = TorchBackend(replace(config, compile_cache=tmp_path))
    backend.warmup()
    sampling = replace(GREEDY, temperature=0.9, top_p=0.8, seed=1)
    plain, early, late = (Request(random_prompt(20), sampling=sampling) for _ in range(3))
    Driver(backend, 32).run(early, num_tokens=12)
    assert (_is_compiled(backend), backend.code) == ([False], CodeState.BUILDING)

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("the thread that runs the steps compiles")

    monkeypatch.setattr("torch._inductor.cpp_builder.CppBuilder.build", refuse)
    monkeypatch.setattr("torch._inductor.codecache._precompile_header", refuse)
    _compiled(backend).wait()
    assert (_is_compiled(backend), backend.code) == ([True], CodeState.COMPILED)
    Driver(backend, 32).run(late, num_tokens=12)
    Driver(TorchBackend(replace(config, compile=False)), 32).run(plain, num_tokens=12)
    assert early.tokens == late.tokens == plain.tokens
    assert not unfinished.exists()
    times = _compiled(backend).times
    assert times.trace > 0 < times.load
    assert times.compile > 0

    monkeypatch.setattr("torch._inductor.codecache.CppWrapperCodeCache.cache", {})  # as in another process
    second = TorchBackend(replace(config, compile_cache=tmp_path))
    second.warmup()
    _proceed(second)
    assert _is_compiled(second) == [True]
    assert _compiled(second).times.compile == 0
    layers = [text.count("def link") for text in map(Path.read_text, folder.glob("*.json"))]
    assert sorted(layers) == [0, 0, 1], (
        "before the layers, after them, and one graph of the layers, which are alike"
    )

    for graph in folder.glob("*.graph"):
        graph.write_bytes(b"broken")
    (folder / "other.graph").touch()  # of another model, whose library is deleted with those of this one
    third = TorchBackend(replace(config, compile_cache=tmp_path))
    third.warmup()
    _proceed(third)
    assert third.code is CodeState.FAILED
    assert not list(folder.glob("*.graph")), "the next start compiles them again"


@pytest.mark.long
def test_nothing_is_compiled_for_a_request(config: TorchBackendConfig) -> None:
    """The number of rows, entries or steps and the kind of draws compile nothing new."""
    backend = TorchBackend(config)
    backend.warmup()
    _compiled(backend).wait()
    counters.clear()
    driver = Driver(backend, 32)
    requests = [
        Request(random_prompt(8 * n + 5), slots=(n,), sampling=replace(GREEDY, temperature=n / 4, top_k=n))
        for n in range(7)
    ]
    for request in requests:
        driver.read(request)
    for number in range(1, 8):
        driver.decode(*requests[:number], num_steps=4, steps_a_launch=4)
    assert not counters, dict(counters)


@pytest.mark.long
def test_neither_chunks_nor_steps_call_the_layers_themselves(
    config: TorchBackendConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that fit their slot, alone and in company, and one that is read into a scratch and packed."""
    backend = TorchBackend(config)
    backend.warmup()
    _compiled(backend).wait()
    _refuse_layers(backend, monkeypatch)
    Driver(backend, 32).run(
        *(Request(random_prompt(length), slots=(slot,)) for slot, length in enumerate((9, 20, 100))),
        num_tokens=3,
    )


@pytest.mark.parametrize("model", [DEMO_MODEL, EVAL_MODEL])
def test_the_models_that_ship_have_graphs(config: TorchBackendConfig, model: Path) -> None:
    """One of the evaluation model's products has a number of inputs that its weight is filled up from."""
    backend = TorchBackend(replace(config, model=str(model), dtype=DtypeName.BFLOAT16))
    backend.warmup()
    while not _compiled(backend)._sources:
        assert backend.use_idle_time()
    layers = [module for module in backend._model.modules() if isinstance(module, GraphedLayer)]
    assert layers
    assert all(layer.sources and layer.chunk for layer in layers)
    backend.close()


def test_the_last_layer_attends_for_the_queries_that_count(
    config: TorchBackendConfig, tmp_path: Path, built_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of two chunks: two steps of the first without single rows, and a voting step of the second."""
    _take_kernels_alone(built_kernels, monkeypatch)
    seen, attend = list[tuple[int, int]](), ModelCache.attend
    backend = TorchBackend(replace(config, compile_cache=tmp_path))
    backend.warmup()
    _compiled(backend).wait()
    assert backend.code is CodeState.KERNELS

    def note(cache: ModelCache, layer: int, query: Tensor, *rest: Any) -> Tensor:
        seen.append((layer, query.shape[2]))
        return attend(cache, layer, query, *rest)

    monkeypatch.setattr(ModelCache, "attend", note)
    Driver(backend, 32).read(Request(random_prompt(64)))
    assert seen == [(0, 32), (1, 32), (2, 2), (0, 32), (1, 32), (2, 4)]


@pytest.mark.long
def test_many_slots_decode_as_few(config: TorchBackendConfig) -> None:
    """Products treat forty sequences otherwise than up to 32. Each has the same bits as in a batch of two."""
    backend = TorchBackend(replace(config, pools=(PoolOptions(40, POLICY),)))
    backend.warmup()
    _compiled(backend).wait()
    assert _is_compiled(backend) == [True]
    answers = []
    for company in (40, 2):
        requests = [
            Request(random_prompt(5 + n, seed=n), slots=(n,), sampling=replace(GREEDY, num_logprobs=3))
            for n in range(40)
        ]
        driver = Driver(backend, 32)
        for request in requests:
            driver.read(request)
        for first in range(0, 40, company):
            driver.decode(*requests[first : first + company], num_steps=6)
        answers.append([request.outputs for request in requests])
    assert answers[0] == answers[1]


@pytest.mark.long
def test_a_pool_of_one_slot_has_its_own_graphs(
    config: TorchBackendConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both decode compiled beside each other, as alone, in two stacks of layers: one of two, one of one."""
    monkeypatch.setattr("backends.torch_backend.compiled.decode_step._LAYERS_PER_GRAPH", 2)
    pools = (PoolOptions(1, POLICY, "one"), PoolOptions(3, POLICY, "three"))
    answers = []
    for is_compiled in (False, True):
        backend = TorchBackend(replace(config, pools=pools, compile=is_compiled))
        backend.warmup()
        if is_compiled:
            _compiled(backend).wait()
            assert _is_compiled(backend) == [True, True]
            for step in _compiled(backend).steps:
                first, second = step._stacks
                assert first.key != second.key
        requests = [Request(random_prompt(20)), Request(random_prompt(40), slots=(2,))]
        for pool, request in enumerate(requests):
            Driver(backend, 32, pool).run(request, num_tokens=8)
        answers.append([request.tokens for request in requests])
    assert answers[0] == answers[1]


@pytest.mark.long
def test_in_bfloat16_the_error_is_no_larger_than_uncompiled(config: TorchBackendConfig) -> None:
    """The logits of decode steps, of eager and of compiled bfloat16, against the same weights in float32."""
    full = replace(
        config,
        dtype=DtypeName.BFLOAT16,
        pools=(PoolOptions(8, PolicyOptions(PolicyName.FULL)),),
        max_model_len=512,  # the graphs are those of `test_batch_invariance`
    )
    errors = {}
    prompt = random_prompt(60)
    for is_compiled in (False, True):
        backend = TorchBackend(replace(full, compile=is_compiled))
        backend.warmup()
        if is_compiled:
            _compiled(backend).wait()
        request = Request(prompt, sampling=replace(GREEDY, num_logprobs=320))
        Driver(backend, 32).run(request, num_tokens=60)
        model = load_oracle(Path(config.model)).bfloat16().float()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + request.tokens[:-1]])).logits[0, len(prompt) :]
        errors[is_compiled] = (_logprobs(request)[1:] - logits.log_softmax(-1)).square().mean().sqrt().item()
    assert 0 < errors[True] <= errors[False]


def _logprobs(request: Request) -> Tensor:
    """Return all log-probabilities [step, token]."""
    return torch.tensor([[value for _, value in sorted(token.top_logprobs)] for token in request.outputs[0]])


def test_without_a_compiler_everything_else_works(
    config: TorchBackendConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    backend = TorchBackend(replace(config, compile_cache=tmp_path))
    backend.warmup()
    with caplog.at_level(logging.WARNING):
        _compiled(backend).wait()
    assert "no C++ compiler no-such-compiler: decode runs uncompiled" in caplog.text
    assert (_is_compiled(backend), backend.code) == ([False], CodeState.FAILED)
    Driver(backend, 32).run(Request(random_prompt(9)), num_tokens=3)


def test_without_a_compiler_the_kernels_of_the_package_are_used(
    config: TorchBackendConfig, tmp_path: Path, built_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run as they were traced. Their tokens are those of the model's own code."""
    plain, traced = (
        Request(random_prompt(40), sampling=replace(GREEDY, temperature=0.9, top_p=0.8, seed=1))
        for _ in range(2)
    )
    Driver(TorchBackend(replace(config, compile=False)), 32).run(plain, num_tokens=40)
    _take_kernels_alone(built_kernels, monkeypatch)
    backend = TorchBackend(replace(config, compile_cache=tmp_path))
    backend.warmup()
    _proceed(backend)
    assert (_is_compiled(backend), backend.code) == ([True], CodeState.KERNELS)
    _refuse_layers(backend, monkeypatch)
    Driver(backend, 32).run(traced, num_tokens=40)
    assert traced.tokens == plain.tokens
    assert not list(tmp_path.rglob("kernels.so"))


def test_another_user_s_code_is_not_loaded(
    config: TorchBackendConfig,
    tmp_path: Path,
    built_kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy_kernels(built_kernels, code_folder(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    backend = TorchBackend(replace(config, compile_cache=tmp_path))
    backend.warmup()
    with caplog.at_level(logging.WARNING):
        _proceed(backend)
    assert f"belongs to user {os.getuid()}" in caplog.text
    assert (_is_compiled(backend), backend.code) == ([False], CodeState.FAILED)
    assert (code_folder(tmp_path) / "kernels.so").exists()


def test_kernels_that_are_there_quantize_the_weights(
    config: TorchBackendConfig, tmp_path: Path, built_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, compile_cache=tmp_path, quantization=Quantization.INT4)
    backends = [TorchBackend(config)]
    copy_kernels(built_kernels, code_folder(tmp_path))
    backends.append(TorchBackend(replace(config, compile=False)))
    with monkeypatch.context() as patch:
        patch.setattr("backends.torch_backend.model.grouped_linear._fitted", None)  # torch's operators
        backends.append(TorchBackend(config))
    first, second = (
        [layer.weight for layer in backend._model.modules() if isinstance(layer, GroupedLinear)]
        for backend in (backends[0], backends[2])
    )
    assert len(first) > 0
    assert all(torch.equal(*weights) for weights in zip(first, second, strict=True))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    backends.append(TorchBackend(config))
    assert [backend._kernels.can_quantize for backend in backends] == [False, False, True, False]


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("is_required", [False, True])
def test_a_backend_whose_weights_are_packed_in_part_is_unusable(
    config: TorchBackendConfig,
    tmp_path: Path,
    built_kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_later: bool,
    is_required: bool,
) -> None:
    """As when memory ends between two layers. Uncompiled steps would read packed weights as plain ones.

    They are packed with the kernels, or later with the graphs if the kernels could not be loaded before.
    """

    def fail() -> None:
        raise RuntimeError("can't allocate memory")

    _take_kernels_alone(built_kernels, monkeypatch)
    if is_later:
        monkeypatch.setattr(CompiledCode, "_use_kernels", lambda _: None)
        monkeypatch.setattr(CompiledCode, "_is_built", lambda _: True)
        monkeypatch.setattr(CompiledCode, "_load", lambda code: code._kernels.use())
        monkeypatch.setattr("backends.torch_backend.compiled.code._has_compiler", lambda: True)
    config = replace(
        config, compile_cache=tmp_path, quantization=Quantization.INT8, require_compiled=is_required
    )
    backend = TorchBackend(config)
    backend._kernels._preparations.insert(0, fail)  # the last one to be run
    layers = [layer for layer in backend._model.modules() if isinstance(layer, QuantizedLinear)]
    assert layers
    plain = [layer.weight.clone() for layer in layers]
    expected = ModelLoadError if is_required else BackendUnusableError

    def start() -> None:
        backend.warmup()
        _proceed(backend)

    with pytest.raises(expected, match="could not be packed"):
        start()
    assert not any(torch.equal(layer.weight, weight) for layer, weight in zip(layers, plain, strict=True))


@pytest.mark.parametrize("has_kernels", [False, True])
def test_attention_is_in_float32_where_the_cpu_lacks_bfloat16(
    config: TorchBackendConfig,
    tmp_path: Path,
    built_kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_kernels: bool,
) -> None:
    """Without the kernels all of it, with them that of decode steps without a graph."""
    monkeypatch.setattr(onednn, "multiplies", lambda dtype: dtype is not torch.bfloat16)
    dtypes: list[torch.dtype] = []

    def attend(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        dtypes.append(query.dtype)
        return grouped_attention(query, *arguments, **options)

    monkeypatch.setattr("backends.torch_backend.forward.cache.grouped_attention", attend)
    backend = TorchBackend(replace(config, dtype=DtypeName.BFLOAT16, compile=False, compile_cache=tmp_path))
    if has_kernels:
        load_kernels(built_kernels)
        backend._kernels.use()
    driver = Driver(backend, 32)
    request = Request(random_prompt(70))
    driver.read(request)
    num_of_prompt = len(dtypes)
    driver.decode(request, num_steps=2)
    num_layers = backend._model.config.num_hidden_layers
    assert num_of_prompt == (0 if has_kernels else 3 * num_layers)
    assert dtypes == [torch.float32] * (num_of_prompt + 2 * num_layers)


def test_a_server_that_requires_compiled_code_ends_without_it(
    config: TorchBackendConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    backend = TorchBackend(replace(config, compile_cache=tmp_path, require_compiled=True))
    with pytest.raises(ModelLoadError, match="require_compiled: decode is not compiled"):
        backend.warmup()
    with pytest.raises(ValueError, match="require_compiled needs compile"):
        replace(config, compile=False, require_compiled=True)


@pytest.mark.usefixtures("cold_builder")
def test_compiling_goes_on_at_normal_priority_after_a_time(
    config: TorchBackendConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TorchBackend(replace(config, compile_cache=tmp_path))
    backend.warmup()
    compiled = _compiled(backend)
    _start_to_build(backend)
    first = compiled._process
    assert first is not None
    assert os.sched_getscheduler(first.pid) == os.SCHED_IDLE or os.getpriority(os.PRIO_PROCESS, first.pid) > 0
    compiled.poll()
    assert compiled._process is first, "it has had no time yet"
    monkeypatch.setattr("backends.torch_backend.compiled.code._LOW_PRIORITY_TIME", 0.0)
    compiled.poll()
    second = compiled._process
    assert second is not None
    assert first.wait(30) == -signal.SIGKILL
    assert os.sched_getscheduler(second.pid) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, second.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    backend.close()
    assert second.returncode == -signal.SIGKILL


def test_an_unwritable_folder_is_not_used(
    config: TorchBackendConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        backend = TorchBackend(replace(config, compile_cache=tmp_path / "file"))
        backend.warmup()
        _proceed(backend)
    assert str(tmp_path / "file") in caplog.text


@pytest.mark.usefixtures("cold_builder")
def test_closing_ends_the_compiler(config: TorchBackendConfig, tmp_path: Path) -> None:
    backend = TorchBackend(replace(config, compile_cache=tmp_path))
    backend.warmup()
    _start_to_build(backend)
    process = _compiled(backend)._process
    assert process is not None
    backend.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_graphs_with_equal_text_are_one() -> None:
    source = trace(lambda tensor: tensor * 2, [ROWS])
    assert GraphSource.from_json(source.to_json()) == source
    assert (
        trace(lambda tensor: tensor * 2, [ROWS]).key
        == source.key
        != trace(lambda tensor: tensor * 3, [ROWS]).key
    )


class _ProductRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the rows of each matrix product."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.counts.append(args[-2].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "function",
    [lambda rows, weight, _: [rows @ weight], lambda rows, weight, bias: [torch.addmm(bias, rows, weight)]],
    ids=["mm", "addmm"],
)
def test_a_product_of_torch_has_more_than_one_row(function: Any) -> None:
    specs = [InputSpec(("rows", 8), "float32"), InputSpec((8, 4), "float32"), InputSpec((4,), "float32")]
    source = trace(function, specs)
    assert not source.needs_rows
    for num_rows in (1, 3):
        tensors = torch.randn(num_rows, 8), torch.randn(8, 4), torch.randn(4)
        with _ProductRows() as rows:
            (output,) = _as_traced(source)(*tensors)
        assert rows.counts == [num_rows + 1]
        torch.testing.assert_close(output, function(*tensors)[0])


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (torch.bmm, (("rows", 2, 8), ("rows", 8, 4))),
        (lambda rows, weight: weight @ rows.T, (("rows", 8), (4, 8))),
        (lambda rows, weight: torch.addmm(rows, rows, weight), (("rows", 8), (8, 8))),
    ],
    ids=["bmm", "transposed", "residual"],
)
def test_other_products_need_rows(function: Any, sizes: Any) -> None:
    specs = [InputSpec(each, "float32") for each in sizes]
    assert trace(lambda *tensors: [function(*tensors)], specs).needs_rows


def test_a_chain_passes_own_and_shared_tensors_to_each_link() -> None:
    scaled = trace(lambda rows, factor, bias: rows * factor + bias, [ROWS, ROWS, InputSpec((4,), "float32")])
    rotated = trace(
        lambda rows, weight, bias: rows @ weight - bias,
        [ROWS, InputSpec((4, 4), "float32"), InputSpec((4,), "float32")],
    )
    source, shared = chain([(scaled, (7,)), (rotated, ()), (scaled, (3,)), (scaled, (7,))])
    assert shared == (7, 3)
    scope: dict[str, Any] = {"torch": torch}
    exec(source.code, scope)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn([5 if size == "rows" else int(size) for size in spec.sizes], generator=generator)
        for spec in source.inputs
    ]
    rows, seven, three, bias, weight, offset, second, third = inputs
    expected = (((rows * seven + bias) @ weight - offset) * three + second) * seven + third
    torch.testing.assert_close(scope["forward"](None, *inputs), expected)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tensor: tensor if tensor.sum() > 0 else -tensor, "Data"),
        (lambda tensor: tensor.view(5, 2, 2), "only one number of rows"),
        (lambda tensor: tensor + CONSTANT, "."),
    ],
    ids=["value", "size", "constant"],
)
def test_an_invalid_static_graph_is_refused(function: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        trace(function, [ROWS])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "are_equal"), [((8, 40), (8, 70), True), ((8, 40), (1, 40), False)]
)
def test_layers_whose_slots_differ_in_size_share_a_graph(
    first: tuple[int, int], second: tuple[int, int], are_equal: bool
) -> None:
    function = LayerFunction(torch.nn.Linear(4, 4))
    structures = []
    for num_slots, capacity in (first, second):
        kind = KindStep(torch.zeros(2, 1), torch.zeros(2, 1, 32))
        planes = (torch.zeros(num_slots, 3, capacity, 4),) * 2
        call = LayerCall((torch.zeros(2, 4),), {})
        decode_call = DecodeCall(call, torch.arange(2), kind, torch.ones(2), planes, ())
        call_specs, cache_specs = decode_call.specs()
        structures.append(function.structure([*call_specs, *cache_specs]))
    assert (structures[0] == structures[1]) is are_equal


@pytest.mark.long
def test_a_layer_that_uses_its_index_is_not_shared(
    config: TorchBackendConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = TorchBackend(config)
    layer = backend._model.get_submodule("model.layers.1.layer")
    plain, attention = layer.forward, layer.get_submodule("self_attn")
    monkeypatch.setattr(
        layer,
        "forward",
        lambda *args, **kwargs: plain(*args, **kwargs) * (2 if attention.layer_idx == 1 else 1),
    )
    layer.factor = 2  # type: ignore[assignment]  # not built like the others
    with caplog.at_level(logging.INFO):
        backend.warmup()
        _proceed(backend)
    assert "uses its index" in caplog.text
    _compiled(backend).wait()
    layers = [module for module in backend._model.modules() if isinstance(module, GraphedLayer)]
    assert [len(layer.graphs) for layer in layers] == [1, 0, 1]
    assert _is_compiled(backend) == [False], "a step is whole or not at all"
    backend.close()
