"""A setting to measure: a cache policy at a compression, as options of `snapserve serve`."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cache.policy import PolicyName
from server.options.command_line import OptionError
from server.options.serve import Config, add_serve_options, read_config

CONTROL_SINKS = 4
CONTROL_RING = 32


@dataclass(frozen=True, slots=True)
class Setting:
    """A cache policy whose slots have length / `compression` entries.

    `policy` None is a running server with its own slots, or the control. `compression` None is the policy's
    default size. `pool` is a running server's pool; None is the pool that a request's length selects.
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

    def observation_window(self, serve_options: Sequence[str]) -> int:
        """Return how many of a prompt's last tokens the policy observes. Raises `OptionError`."""
        policy = () if self.policy is None else ("--policy", self.policy)
        scorer = serve_config((*serve_options, *policy)).backend.config.pools[0].policy.scorer
        return 0 if scorer is None else scorer.observation_window

    def slot_options(self, length: int, num_decoded: int, observation_window: int) -> tuple[str, ...]:
        """Return the options that size the slots for prompts of `length` tokens.

        A slot has length / compression entries. Decode reads at most `num_decoded` tokens after prefill.
        Raises `OptionError` for a slot too small for the policy.
        """
        if self.is_control:
            sizes = ("--num-sink", str(CONTROL_SINKS), "--num-recent", str(CONTROL_RING))
            return ("--policy", PolicyName.STREAMING_LLM, *sizes)
        assert self.policy is not None, "a running server already has its slots"
        if self.compression is None:
            return ("--policy", self.policy)
        capacity = int(length / self.compression)
        if self.policy is PolicyName.SNAPKV:
            # SnapKV never evicts after prefill. It keeps `capacity` entries of the prompt, and its slot has
            # room for all decoded tokens besides: an advantage that belongs to the method.
            num_kept = capacity - observation_window
            if num_kept < 0:
                raise OptionError(f"{self._budget(length)}: fewer than its window of {observation_window}")
            num_recent = observation_window + num_decoded
            return ("--policy", self.policy, "--num-kept", str(num_kept), "--num-recent", str(num_recent))
        return ("--policy", self.policy, "--slot-capacity", str(capacity))

    def check(self, options: Sequence[str], length: int) -> None:
        """Raise `OptionError` for engine options that do not fit together, before anything is measured.

        The message names the compression and length that led to the capacity.
        """
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
    """Return each policy at each compression. The policies full and sparse have none: they hold everything.

    The default is `snapstream` at compression 4.
    """
    settings = [
        Setting(policy, ratio)
        for policy in dict.fromkeys(policies or (PolicyName.SNAPSTREAM,))
        for ratio in (
            (None,)
            if policy in (PolicyName.FULL, PolicyName.SPARSE)
            else dict.fromkeys(compressions or (4.0,))
        )
    ]
    return settings + [Setting(None, is_control=True)] * has_control


def serve_config(options: Sequence[str]) -> Config:
    """Return the configuration of `snapserve serve` for these options, without the environment's variables.

    Raises `OptionError`.
    """
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
    """Return the model's name in results: for a folder, the name of the folder without its path."""
    name = serve_config(("--model", model)).server.model_names[0]
    return Path(name).name if Path(name).is_dir() else name
