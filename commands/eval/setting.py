"""What is measured: a policy with slots that are so many times smaller than a prompt, as options of `snapserve serve`."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cache.policy import PolicyName
from server.options.command_line import OptionError
from server.options.serve import Config, add_serve_options, read_config

CONTROL_SINKS, CONTROL_RING = 4, 32


@dataclass(frozen=True, slots=True)
class Setting:
    """`policy` None is whatever a server has that was not started here, `compression` None is none of our choosing.

    `pool` is the one of that server's that is asked; None: the one that a request's length leads to.
    """

    policy: PolicyName | None
    compression: float | None = None
    is_control: bool = False
    pool: str | None = None

    @property
    def label(self) -> str:
        if self.is_control:
            return "control"
        if self.policy is None:
            return self.pool or "as served"
        return str(self.policy) if self.compression is None else f"{self.policy} {self.compression:g}x"

    def slot_options(self, length: int, num_decoded: int, observation_window: int) -> tuple[str, ...]:
        """Return what makes the slots of prompts of `length` tokens, after which decode takes at most `num_decoded` tokens.

        A slot has length / compression entries. SnapKV, which never gives an entry up, keeps as many of the prompt, and has room for what
        decode takes besides: that is its way, and to its advantage. Raises `OptionError`.
        """
        if self.is_control:
            return (
                "--policy",
                PolicyName.STREAMING_LLM,
                "--num-sink",
                str(CONTROL_SINKS),
                "--num-recent",
                str(CONTROL_RING),
            )
        assert self.policy is not None, "a server that is there already has its slots"
        if self.compression is None:
            return ("--policy", self.policy)
        capacity = int(length / self.compression)
        if self.policy is PolicyName.SNAPKV:
            num_kept = capacity - observation_window
            if num_kept < 0:
                raise OptionError(f"{self._budget(length)}: fewer than its window of {observation_window}")
            return (
                "--policy",
                self.policy,
                "--num-kept",
                str(num_kept),
                "--num-recent",
                str(observation_window + num_decoded),
            )
        return ("--policy", self.policy, "--slot-capacity", str(capacity))

    def check(self, options: Sequence[str], length: int) -> None:
        """Refuse options of the engine, with those of slots, that cannot be. Raises `OptionError`, which says what made the capacity."""
        try:
            serve_config(options)
        except OptionError as error:
            raise OptionError(
                str(error) if self.compression is None else f"{self._budget(length)}: {error}"
            ) from error

    def _budget(self, length: int) -> str:
        assert self.compression is not None
        capacity = int(length / self.compression)
        return (
            f"--compression {self.compression:g} at --length {length} leaves {self.policy} {capacity} entries"
        )


def settings_of(
    policies: Sequence[PolicyName], compressions: Sequence[float], has_control: bool
) -> list[Setting]:
    """Return each policy at each compression; full has none. Of neither given, `snapstream` at 4 is meant."""
    settings = [
        Setting(policy, ratio)
        for policy in dict.fromkeys(policies or (PolicyName.SNAPSTREAM,))
        for ratio in ((None,) if policy is PolicyName.FULL else dict.fromkeys(compressions or (4.0,)))
    ]
    return settings + [Setting(None, is_control=True)] * has_control


def serve_config(options: Sequence[str]) -> Config:
    """Return what `snapserve serve` makes of these options alone, without the environment's. Raises `OptionError`."""
    parser = argparse.ArgumentParser(
        prog="--serve-options", add_help=False, exit_on_error=False, allow_abbrev=False
    )
    add_serve_options(parser)
    try:
        arguments, unknown = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise OptionError(f"--serve-options: {error}") from error
    if unknown:
        raise OptionError(
            f"--serve-options has {' '.join(unknown)}, which is not an option of snapserve serve"
        )
    return read_config(arguments, {})


def split_options(value: str) -> tuple[str, ...]:
    """Return the words of --serve-options. Raises `OptionError`."""
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise OptionError(f"--serve-options: {error}") from error


def model_id(model: str) -> str:
    """Return what results call a model: a folder's own name tells enough."""
    name = serve_config(("--model", model)).server.model_names[0]
    return Path(name).name if Path(name).is_dir() else name
