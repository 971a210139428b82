"""Policies and compressions as options of the server."""

import re
from array import array
from pathlib import Path

import pytest

from cache.policy import CachePolicy, PolicyName
from cache.pool_options import PoolOptions
from commands.eval.prompts import TokenPrompt
from commands.eval.setting import Setting, model_id, serve_config, settings_of, split_options
from commands.eval.target import Target
from server.options.command_line import OptionError
from server.options.models import DEMO_MODEL

LENGTH, NUM_DECODED, WINDOW = 4096, 60, 32


def policy_of(setting: Setting) -> CachePolicy:
    options = setting.slot_options(LENGTH, NUM_DECODED, WINDOW)
    pool: PoolOptions = serve_config(options).backend.config.pools[0]
    return pool.policy.resolve(LENGTH + NUM_DECODED)


def test_each_policy_at_each_compression_and_those_that_hold_all_once() -> None:
    policies = [PolicyName.FULL, PolicyName.SPARSE, PolicyName.SNAPSTREAM]
    settings = settings_of(policies, [4.0, 8.0], has_control=True)
    assert [setting.label for setting in settings] == [
        "full",
        "sparse",
        "snapstream 4x",
        "snapstream 8x",
        "control",
    ]


@pytest.mark.parametrize("policy", [PolicyName.SNAPSTREAM, PolicyName.STREAMING_LLM])
@pytest.mark.parametrize("compression", [2.0, 4.0, 16.0])
def test_slot_capacity_is_length_divided_by_compression(policy: PolicyName, compression: float) -> None:
    resolved = policy_of(Setting(policy, compression))
    assert (resolved.name, resolved.layout.capacity) == (policy, LENGTH // compression)


def test_snapkv_keeps_capacity_entries_and_has_room_for_decode() -> None:
    resolved = policy_of(Setting(PolicyName.SNAPKV, 4.0))
    assert resolved.prompt_window + resolved.layout.num_kept == LENGTH // 4
    assert resolved.max_output_tokens(LENGTH, LENGTH + NUM_DECODED) == NUM_DECODED


@pytest.mark.parametrize("compression", [2.0, 4.0])
@pytest.mark.parametrize("policy", [PolicyName.SNAPKV, PolicyName.SNAPSTREAM])
def test_policies_hold_equally_many_tokens_of_a_prompt(policy: PolicyName, compression: float) -> None:
    """With the server's own options: the policies' default observation windows differ."""
    setting = Setting(policy, compression)
    prompt = TokenPrompt(array("i", [5] * 2000), 1999, 10)
    target = Target("demo", 2000, concurrency=1)
    pool = serve_config(target.options(setting, [prompt])).backend.config.pools[0]
    resolved = pool.policy.resolve(2010)
    held = resolved.layout.num_kept + resolved.prompt_window + resolved.layout.num_sink
    assert held == 2000 // compression


def test_the_control_keeps_nothing() -> None:
    layout = policy_of(Setting(None, is_control=True)).layout
    assert (layout.num_kept, layout.capacity) == (0, 36)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--num-sinks 4", "--serve-options has --num-sinks 4, which is not an option"),
        ("--pooling", "--serve-options: argument --pooling"),
        ("--pooling 'max", "--serve-options: No closing quotation"),
        ("--pooling sum", "--pooling must be one of average, maximum, got 'sum'"),
    ],
)
def test_invalid_options_are_refused(options: str, message: str) -> None:
    with pytest.raises(OptionError, match="^" + re.escape(message)):
        serve_config(split_options(options))


def test_results_call_a_folder_by_its_name(tmp_path: Path) -> None:
    assert model_id(str(DEMO_MODEL)) == "snapserve-demo"
    assert model_id(str(tmp_path)) == tmp_path.name
    assert model_id("some/model") == "some/model"


def test_a_slot_too_small_for_its_policy_is_refused_with_the_cause() -> None:
    setting = Setting(PolicyName.SNAPSTREAM, 16.0)
    options = ("--observation-window", "48", *setting.slot_options(600, NUM_DECODED, 48))
    message = (
        "--compression 16 at --length 600 leaves snapstream 37 entries: "
        "--slot-capacity must be at least 67 for policy snapstream"
    )
    with pytest.raises(OptionError, match="^" + message):
        setting.check(options, 600)
    with pytest.raises(OptionError, match=r"^--slot-capacity must be at least 5 "):
        Setting(None, is_control=True).check(("--policy", "streaming-llm", "--slot-capacity", "4"), 600)


def test_a_budget_below_snapkvs_window_is_refused() -> None:
    with pytest.raises(
        OptionError,
        match=r"--compression 512 at --length 4096 leaves snapkv 8 entries: fewer than its window of 32",
    ):
        policy_of(Setting(PolicyName.SNAPKV, 512.0))
