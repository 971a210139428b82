"""`snapserve eval fidelity`: next-token distributions of packed slots against those of the whole cache.

A server returns log-probabilities of the likeliest tokens only. This needs those of the whole vocabulary, so
it uses the torch backend in this process. Two backends of the same model read the same text: the setting's,
and one with policy full and unquantized weights. Both pack after `length` tokens and decode the tokens that
follow, with the text's own token as the next input (teacher forcing).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.clock import WallClock
from backends.config import ConfiguredBackend
from backends.conversion import with_local_model
from backends.interface import (
    Backend,
    BackendError,
    DecodeBatch,
    DecodeRow,
    Draw,
    PrefillBatch,
    PrefillRow,
    SampledToken,
    SamplingParams,
)
from backends.torch_backend.config import Quantization, TorchBackendConfig
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from commands.eval.errors import EvalError
from commands.eval.options import MeasuredOptions, TextOptions
from commands.eval.prompts import load_tokenizer
from commands.eval.setting import Setting, model_id, serve_config, settings_of, split_options
from commands.shared.progress import ProgressLine
from server.options.command_line import OptionError
from server.options.serve import Config
from server.text.tokenizer import RenderError
from server.version import server_version

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FidelityConfig:
    """The configuration of `snapserve eval fidelity`."""

    model: str
    settings: Sequence[Setting]
    text: Path
    length: int
    num_scored: int
    num_windows: int
    serve_options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The predictions of one setting against policy full. Arrays are [window, position].

    `kl` is KL(full ‖ setting) in nats. `agrees` is 1 where the likeliest token is the same. `loss` and
    `full_loss` are the negative log-probabilities of the text's next token in nats, without the last
    position, whose next token is unknown.
    """

    setting: Setting
    options: tuple[str, ...]
    kl: Floats
    agrees: Floats
    loss: Floats
    full_loss: Floats

    def as_json(self) -> dict[str, Any]:
        return {
            "label": self.setting.label,
            "policy": self.setting.policy,
            "compression": self.setting.compression,
            "serve_options": self.options,
            "kl": float(self.kl.mean()),
            "top1_agreement": float(self.agrees.mean()),
            "perplexity": float(np.exp(self.loss.mean())),
            "full_perplexity": float(np.exp(self.full_loss.mean())),
            "kl_by_position": self.kl.mean(0).tolist(),
            "top1_agreement_by_position": self.agrees.mean(0).tolist(),
            "packed_share": 1.0,
        }


@dataclass(frozen=True, slots=True)
class FidelityResult:
    config: FidelityConfig
    num_windows: int
    runs: Sequence[Fidelity]

    @property
    def model_id(self) -> str:
        return model_id(self.config.model)

    def as_json(self) -> dict[str, Any]:
        return {
            "suite": "fidelity",
            "version": server_version(),
            "model": self.model_id,
            "length": self.config.length,
            "num_scored": self.config.num_scored,
            "num_windows": self.num_windows,
            "distributions": "whole vocabulary, in process",
            "runs": [run.as_json() for run in self.runs],
        }


def fidelity_config(measured: MeasuredOptions, text: TextOptions) -> FidelityConfig:
    """Return the configuration that options make. Raises `OptionError`."""
    if text.text is None:
        raise OptionError("--text must name a file")
    return FidelityConfig(
        settings=settings_of(measured.policy, measured.compression, has_control=False),
        text=Path(text.text),
        serve_options=split_options(measured.serve_options),
        model=measured.model,
        length=text.length,
        num_scored=text.num_scored,
        num_windows=text.num_windows,
    )


def measure_fidelity(config: FidelityConfig) -> FidelityResult:
    """Compare every setting with policy full along the text.

    Raises `OptionError` for an unreadable text or sizes that do not fit, `EvalError` for a failing model.
    """
    # All options are checked before the first setting is measured.
    options_by_setting = [_options(config, setting) for setting in config.settings]
    windows = read_windows(config)
    runs = []
    for setting, options in zip(config.settings, options_by_setting, strict=True):
        try:
            served = serve_config(("--model", config.model, *options))
            whole = _with_whole_cache(served)
            with (
                closing(_load(served.backend)) as packed,
                closing(_load(whole)) as full,
            ):
                runs.append(_compare(setting, options, packed, full, windows, config))
        except (BackendError, ValueError) as error:
            raise EvalError(f"{setting.label}: {error}") from error
    return FidelityResult(config, len(windows), runs)


def read_windows(config: FidelityConfig) -> list[tuple[int, ...]]:
    """Return consecutive windows of the text, each of length + num_scored tokens. Raises `OptionError`."""
    tokenizer = load_tokenizer(config.model)
    try:
        token_ids = tokenizer.encode(config.text.read_text(), add_special_tokens=False)
    except (OSError, UnicodeDecodeError, RenderError) as error:
        raise OptionError(f"--text {config.text} cannot be read: {error}") from error
    special_ids = tokenizer.encode("", add_special_tokens=True)  # those at the start of every prompt
    size = config.length + config.num_scored - len(special_ids)
    windows = [
        (*special_ids, *token_ids[start : start + size])
        for start in range(0, len(token_ids) - size + 1, size)
    ]
    if not windows:
        raise OptionError(
            f"--text {config.text} has {len(token_ids)} tokens, but --length {config.length} and "
            f"--num-scored {config.num_scored} need {size}"
        )
    return windows[: config.num_windows]


def _options(config: FidelityConfig, setting: Setting) -> tuple[str, ...]:
    window = setting.observation_window(config.serve_options)
    slots = setting.slot_options(config.length, config.num_scored, window)
    max_model_len = str(config.length + config.num_scored)
    sizes = ("--num-slots", "1", "--num-scratch", "1", "--max-model-len", max_model_len)
    options = (*config.serve_options, *slots, *sizes)
    setting.check(options, config.length)
    return options


def _with_whole_cache(served: Config) -> ConfiguredBackend[TorchBackendConfig]:
    """Return the same backend with the whole cache and unquantized weights."""
    config = served.backend.config
    if not isinstance(config, TorchBackendConfig):
        raise OptionError("--serve-options must choose --backend torch: the others have no model")
    pools = (PoolOptions(config.pools[0].num_slots, PolicyOptions(PolicyName.FULL)),)
    return replace(served.backend, config=replace(config, pools=pools, quantization=Quantization.NONE))


def _load(backend: ConfiguredBackend[Any]) -> Backend:
    return with_local_model(backend).load(WallClock(), vocab_size=0)


def _compare(
    setting: Setting,
    options: tuple[str, ...],
    packed: Backend,
    full: Backend,
    windows: Sequence[tuple[int, ...]],
    config: FidelityConfig,
) -> Fidelity:
    kl = np.zeros((len(windows), config.num_scored))
    agrees = np.zeros((len(windows), config.num_scored))
    loss = np.zeros((len(windows), config.num_scored - 1))
    full_loss = np.zeros((len(windows), config.num_scored - 1))
    progress = ProgressLine(sys.stderr, setting.label, len(windows) * config.num_scored)
    try:
        for index, window in enumerate(windows):
            full_steps = _predictions(full, window, config.length)
            packed_steps = _predictions(packed, window, config.length)
            for position, (expected, predicted) in enumerate(zip(full_steps, packed_steps, strict=True)):
                # Rounding can make the divergence of equal distributions slightly negative.
                kl[index, position] = max(float(np.exp(expected) @ (expected - predicted)), 0.0)
                agrees[index, position] = expected.argmax() == predicted.argmax()
                if position + 1 < config.num_scored:
                    next_id = window[config.length + position + 1]
                    loss[index, position] = -predicted[next_id]
                    full_loss[index, position] = -expected[next_id]
                progress(True)
    finally:
        progress.close()
    return Fidelity(setting, options, kl, agrees, loss, full_loss)


def _predictions(backend: Backend, window: Sequence[int], num_read: int) -> Iterator[Floats]:
    """Yield the log-probabilities [vocabulary] of the token after each token from `num_read` on.

    They are read from the packed slot, which was filled with the first `num_read` tokens.
    """
    draw = Draw(SamplingParams(temperature=0.0, num_logprobs=backend.spec.vocab_size))
    _prefill(backend, window[:num_read], Draw(SamplingParams(temperature=0.0)))
    for index in range(num_read, len(window)):
        row = DecodeRow("fidelity", 0, window[index], index, num_read, draw)
        result = backend.submit(DecodeBatch((row,))).result()
        yield _logprobs(result.tokens[0][0], backend.spec.vocab_size)


def _prefill(backend: Backend, token_ids: Sequence[int], draw: Draw) -> None:
    """Fill slot 0 with a prompt, chunk by chunk."""
    spec = backend.spec
    shape = max(spec.prefill_shapes, key=lambda shape: (shape.num_tokens, -shape.num_rows))
    scratch = None if len(token_ids) <= spec.pools[0].max_direct_tokens else 0
    for start in range(0, len(token_ids), shape.num_tokens):
        chunk = tuple(token_ids[start : start + shape.num_tokens])
        is_last = start + len(chunk) == len(token_ids)
        row = PrefillRow(
            "fidelity",
            chunk,
            start,
            len(token_ids),
            slots=(0,),
            scratch=scratch,
            draws=(draw,) if is_last else (),
        )
        backend.submit(PrefillBatch((row,), shape)).result()


def _logprobs(token: SampledToken, vocab_size: int) -> Floats:
    """Return the log-probabilities [vocabulary] by token id."""
    logprobs = np.full(vocab_size, -np.inf)
    # `zip` would make an iterator for each of a large vocabulary's tokens, which takes longer than the step.
    pairs = np.fromiter(chain.from_iterable(token.top_logprobs), np.float64).reshape(-1, 2)
    logprobs[pairs[:, 0].astype(np.intp)] = pairs[:, 1]
    return logprobs
