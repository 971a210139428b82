"""Options from flags and variables, what they make, and what is said when they cannot be."""

import re
from pathlib import Path

import pytest

from backends.torch_backend.config import DtypeName, Quantization
from cache.layout import SlotLayout
from cache.policy import PolicyName, sparse
from cache.policy_options import DEFAULT_SCORERS, LayerBudgets
from cache.scorer import Pooling, SoftmaxDomain, WindowScorer
from commands.cli import make_parser
from scheduler.waiting import QueueOrder
from server.options.command_line import OptionError
from server.options.serve import Config, read_config
from server.options.settings import BatchOptions

DOCS = Path(__file__).parents[3] / "docs"


def config_of(*flags: str, **environment: str) -> Config:
    return read_config(make_parser("serve").parse_args(["serve", *flags]), environment)


def test_defaults() -> None:
    config = config_of()
    assert config.backend.config.pools[0].policy.name is PolicyName.SNAPSTREAM
    assert (config.process.host, config.process.port) == ("127.0.0.1", 8000)
    assert config.server.api_keys == ()
    assert config.server.api.metrics_require_key


def test_a_flag_overrides_its_variable_and_that_the_default() -> None:
    assert config_of().backend.config.pools[0].num_slots == 8
    assert config_of(SNAPSERVE_NUM_SLOTS="3").backend.config.pools[0].num_slots == 3
    assert config_of("--num-slots", "5", SNAPSERVE_NUM_SLOTS="3").backend.config.pools[0].num_slots == 5


def test_no_key_may_fill_the_queue_where_there_are_several() -> None:
    def share(*flags: str) -> int | None:
        return config_of("--max-num-waiting", "5", *flags).scheduler.max_num_waiting_per_tenant

    assert share() is share("--api-key", "one") is None
    assert share("--api-key", "one", "two") == 3
    assert share("--api-key", "one", "two", "--max-num-waiting-per-key", "1") == 1


def test_switches() -> None:
    assert config_of("--lend-kept").backend.config.pools[0].policy.lend_kept
    assert config_of(SNAPSERVE_LEND_KEPT="true").backend.config.pools[0].policy.lend_kept
    assert (
        not config_of("--no-lend-kept", SNAPSERVE_LEND_KEPT="true").backend.config.pools[0].policy.lend_kept
    )
    assert config_of().backend.config.pools[0].policy.lend_ring is None
    assert config_of("--no-lend-ring").backend.config.pools[0].policy.lend_ring is False
    assert not config_of("--no-metrics-require-key").server.api.metrics_require_key


@pytest.mark.parametrize("url", ["http://host", "redis://host:port", "host:6379", ""])
def test_a_wrong_url_of_redis(url: str) -> None:
    with pytest.raises(
        OptionError, match=r"--state-url must be [^,]*, with rediss for TLS, unix:///path or sqlite:///path$"
    ):
        config_of("--state-url", url)  # not printed: it may hold a password
    assert (
        config_of("--state-url", "rediss://:word@host:1/2").server.api.state_url == "rediss://:word@host:1/2"
    )
    assert "word" not in repr(config_of("--state-url", "rediss://:word@host:1/2").server)


def test_the_file_of_a_state(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/responses.db"
    assert config_of("--state-url", url).server.api.state_url == url
    for wrong in ("sqlite:responses.db", "sqlite://responses.db", "sqlite://"):
        with pytest.raises(OptionError, match=r"--state-url must be a URL like sqlite:///path"):
            config_of("--state-url", wrong)
    for wrong in (f"sqlite://{tmp_path}", f"sqlite://{tmp_path}/missing/responses.db"):
        with pytest.raises(OptionError, match="--state-url must be a file that can be written"):
            config_of("--state-url", wrong)


def test_options_reach_their_floor() -> None:
    config = config_of(
        *(
            "--dtype",
            "float32",
            "--policy",
            "snapstream",
            "--softmax-domain",
            "all",
            "--scheduling-order",
            "priority",
        ),
        *(
            "--num-sink",
            "2",
            "--num-recent",
            "10",
            "--num-kept",
            "6",
            "--observation-window",
            "4",
            "--request-timeout",
            "1.5",
        ),
        *(
            "--quantization",
            "int8",
            "--drain-timeout",
            "0",
            "--max-body-size",
            "100",
            "--max-num-waiting",
            "0",
            "--max-model-len",
            "64",
        ),
    )
    assert config.backend.config.dtype is DtypeName.FLOAT32
    assert config.backend.config.quantization is Quantization.INT8
    assert config.backend.config.pools[0].policy.scorer is not None
    assert config.backend.config.pools[0].policy.scorer.softmax_domain is SoftmaxDomain.ALL
    assert config.backend.config.pools[0].policy.resolve(64).layout.capacity == 18
    assert config.scheduler.order is QueueOrder.PRIORITY
    assert config.scheduler.max_num_waiting == 0
    assert config.server.scheduling.scheduling_order is QueueOrder.PRIORITY
    assert config.server.scheduling.request_timeout == 1.5
    assert config.server.api.max_body_size == 100
    assert config.process.drain_timeout == 0


def test_each_policy_has_its_own_scorer() -> None:
    snapkv = config_of("--policy", "snapkv", "--pooling", "maximum").backend.config.pools[0].policy.scorer
    assert snapkv == WindowScorer(softmax_domain=SoftmaxDomain.ALL, pooling=Pooling.MAXIMUM)
    assert config_of().backend.config.pools[0].policy.scorer == DEFAULT_SCORERS[PolicyName.SNAPSTREAM]
    assert config_of("--policy", "full").backend.config.pools[0].policy.scorer is None


GUESSED_RECIPE = (
    "--layer-budgets equal --observation-window 32 --num-echoed 0 --observation-half-life 0 --least-vote 0 "
    "--softmax-domain candidates --query-reduction sum "
    "--pooling average --pooling-size 5 --pooling-shift 0 --pooling-half-life 0 --no-lend-ring"
)


@pytest.mark.parametrize(
    ("flags", "former"),
    [
        ("--selection snapstream", GUESSED_RECIPE),
        ("--selection snapkv", f"{GUESSED_RECIPE} --softmax-domain all"),
        ("--selection chunkkv", f"{GUESSED_RECIPE} --softmax-domain all --selection-chunk 20"),
        ("--selection default", ""),
        ("--policy snapkv --selection default", "--policy snapkv"),
        ("--selection-options pooling=average,num-echoed=3", "--pooling average --num-echoed 3"),
        ("--selection-options lend-ring=no,share-votes=no", "--no-lend-ring --no-share-votes"),
        ("--selection snapkv --pooling maximum", "--selection snapkv --selection-options pooling=maximum"),
        ("--policy full --selection snapkv", "--policy full"),
    ],
)
def test_a_selection_stands_for_its_numbers(flags: str, former: str) -> None:
    """The former flags still work."""
    assert config_of(*flags.split()).backend.config.pools == config_of(*former.split()).backend.config.pools


def test_pools_have_selections() -> None:
    pools = config_of("--pool", "snapstream:selection=chunkkv,pooling-size=7", "snapkv").backend.config.pools
    assert pools[0].policy.scorer == WindowScorer(
        softmax_domain=SoftmaxDomain.ALL, selection_chunk=20, pooling_size=7
    )
    assert pools[0].policy.layer_budgets is LayerBudgets.EQUAL
    assert pools[1].policy.scorer == DEFAULT_SCORERS[PolicyName.SNAPKV]


def test_files_and_batches(tmp_path: Path) -> None:
    assert config_of().server.batches == BatchOptions()
    flags = (
        "--batch-dir",
        str(tmp_path),
        "--max-file-size",
        "9",
        "--max-files",
        "8",
        "--max-file-storage",
        "7",
        "--max-body-size",
        "6",
    )
    config = config_of(*flags, "--batch-concurrency", "5")
    assert config.server.batches == BatchOptions(
        batch_dir=tmp_path, batch_concurrency=5, max_file_size=9, max_files=8, max_file_storage=7
    )
    assert config.scheduler.num_background_slots(8) == 5
    assert config_of().scheduler.num_background_slots(8) == 4


def test_names_and_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\nalpha\n\n  beta \n")
    assert config_of(
        "--api-key", "a", "b", "--api-key", "c", "--api-key-file", str(keys)
    ).server.api_keys == (
        "a",
        "b",
        "c",
        "alpha",
        "beta",
    )
    assert config_of(SNAPSERVE_API_KEY="a, b").server.api_keys == ("a", "b")
    assert config_of("--served-model-name", "x", "y").server.model_names == ("x", "y")
    assert config_of("--model", "some/model").server.model_names == ("some/model",)
    assert config_of("--model", "demo", "--served-model-name", "*").server.model_names == (
        "snapserve-demo",
        "*",
    )


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(config_of("--api-key", "secret"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch-concurrency", "0"), "--batch-concurrency must be a whole number of at least 1, got '0'"),
        (("--num-slots", "0"), "--num-slots must be a whole number of at least 1, got '0'"),
        (("--num-slots", "8.0"), "--num-slots must be a whole number of at least 1, got '8.0'"),
        (("--port", "1_0"), "--port must be a whole number from 0 to 65535, got '1_0'"),
        (("--port", "70000"), "--port must be a whole number from 0 to 65535, got '70000'"),
        (
            ("--policy", "lru"),
            "--policy must be one of full, streaming-llm, snapkv, snapstream, sparse, got 'lru'",
        ),
        (("--queue-timeout", "-1"), "--queue-timeout must be a number of seconds of at least 0, got '-1'"),
        (("--queue-timeout", "nan"), "--queue-timeout must be a number of seconds of at least 0, got 'nan'"),
        (("--pooling-size", "4"), "--selection-options pooling-size must be odd and at least 1, got 4"),
        (
            ("--selection", "h2o"),
            "--selection must be one of default, snapstream, snapkv, chunkkv, got 'h2o'",
        ),
        (("--selection-options", "size=4"), "--selection-options: there is no key 'size'; the keys are obs"),
        (("--selection-options", "pooling"), "--selection-options pooling: 'pooling' must have a value"),
        (
            ("--selection-options", "pooling=sum"),
            "pooling of --selection-options must be one of average, maximum, got 'sum'",
        ),
        (
            ("--selection-options", "pooling=average,pooling=maximum"),
            "--selection-options pooling=average,pooling=maximum: 'pooling' is given more than once",
        ),
        (
            ("--selection-options", "pooling=average", "--pooling", "maximum"),
            "--selection-options: --pooling gives 'pooling' too: remove one of them",
        ),
        (
            ("--pool", "full", "--selection", "snapkv"),
            "--selection describes the slots of a single pool",
        ),
        (("--pool", "full", "--pooling", "maximum"), "--pooling describes the slots of a single pool"),
        (("--policy", "full", "--num-sink", "3"), "--num-sink is not an option of policy full"),
        (
            ("--slot-capacity", "3"),
            ("--slot-capacity must be at least 67 for policy snapstream with --num-sink 4, got 3"),
        ),
        (
            ("--policy", "snapkv", "--num-recent", "32"),
            "--num-recent must be at least 33 for policy snapkv with --selection-options",
        ),
        (
            ("--policy", "snapkv", "--observation-window", "4096"),
            "--slot-capacity must be at least 8193 for policy snapkv with --selection-options observation-wi",
        ),
        (("--scratch-capacity", "0"), "--scratch-capacity must be a whole number of at least 1, got '0'"),
        (("--model", ""), "--model must be a hub id, or a folder or GGUF file that exists, got ''"),
        (
            ("--model", "/does/not/exist"),
            "--model must be a hub id, or a folder or GGUF file that exists, got '/does/not/exist'",
        ),
        (("--api-key-file", "/does/not/exist"), "--api-key-file /does/not/exist cannot be read"),
    ],
)
def test_an_invalid_option_is_reported_with_its_flag(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match="^" + re.escape(message)):
        config_of(*flags)


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(OptionError, match=r"^SNAPSERVE_PORT must be a whole number"):
        config_of(SNAPSERVE_PORT="http")
    with pytest.raises(OptionError, match=r"^SNAPSERVE_METRICS_REQUIRE_KEY must be one of 1, true"):
        config_of(SNAPSERVE_METRICS_REQUIRE_KEY="y")


@pytest.mark.parametrize("value", ["", ",", "a,,b"])
def test_a_variable_that_is_set_to_nothing_is_no_default(value: str) -> None:
    """A key that was meant to be there must not leave the server open."""
    with pytest.raises(OptionError, match=r"^SNAPSERVE_API_KEY must be not empty"):
        config_of(SNAPSERVE_API_KEY=value)


def test_a_key_file_without_keys_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# none yet\n")
    with pytest.raises(OptionError, match="has no key"):
        config_of("--api-key-file", str(keys))


def test_several_pools() -> None:
    narrow, wide = config_of(
        *(
            "--pool",
            "snapstream:slots=32,capacity=1024,recent=512,observation-window=16,lend-kept=yes",
            "--max-model-len",
            "9000",
        ),
        *("--pool", "full:slots=2,capacity=4096,name=exact"),
    ).backend.config.pools
    assert (narrow.label, narrow.num_slots, narrow.policy.lend_kept) == ("snapstream", 32, True)
    assert narrow.policy.scorer is not None
    assert narrow.policy.scorer.observation_window == 16
    assert narrow.policy.resolve(9000).layout == SlotLayout(4, 512, 508)
    assert (wide.label, wide.num_slots, wide.policy.resolve(9000).layout.capacity) == ("exact", 2, 4096)
    written = config_of(SNAPSERVE_POOL="streaming-llm:capacity=64  full").backend.config.pools
    assert [(pool.label, pool.num_slots) for pool in written] == [("streaming-llm", 8), ("full", 8)]
    assert written[1].policy.resolve(512).layout.capacity == 512


def test_a_sparse_pool() -> None:
    [single] = config_of(
        "--policy", "sparse", "--num-recent", "60", "--num-attended", "64"
    ).backend.config.pools
    [named] = config_of("--pool", "sparse:recent=60,attended=64").backend.config.pools
    assert single == named
    assert single.policy.resolve(1000) == sparse(4, 60, 936, 64)


def test_the_type_of_keys_and_values_is_one_of_a_pool() -> None:
    [auto] = config_of().backend.config.pools
    [single] = config_of("--kv-cache-dtype", "int8").backend.config.pools
    pools = config_of("--pool", "snapstream:kv-cache-dtype=int8", "full").backend.config.pools
    [fp8] = config_of("--kv-cache-dtype", "fp8").backend.config.pools
    found = [pool.kv_cache_dtype for pool in (auto, single, *pools, fp8)]
    assert found == ["auto", "int8", "int8", "auto", "fp8"]
    with pytest.raises(OptionError, match="--kv-cache-dtype must be one of auto, int8, fp8, got 'fp4'"):
        config_of("--kv-cache-dtype", "fp4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--pool", "half"), "policy of --pool half must be one of full, "),
        (("--pool", "full:slots=0"), "slots of --pool full:slots=0 must be a whole number of at least 1"),
        (
            ("--pool", "full:size=3"),
            "--pool full:size=3: there is no key 'size'; the keys are name, slots, capacity",
        ),
        (("--pool", "full:slots=2.0"), "slots of --pool full:slots=2.0 must be a whole number of at least 1"),
        (("--pool", "full:slots"), "--pool full:slots: 'slots' must have a value"),
        (("--pool", "full:slots=1,slots=2"), "--pool full:slots=1,slots=2: 'slots' is given more than once"),
        (("--pool", "sparse:kept=2"), "--pool sparse:kept=2: num_kept is not an option of policy sparse"),
        (
            ("--pool", "sparse:kv-cache-dtype=int8"),
            "--pool sparse:kv-cache-dtype=int8: kv_cache_dtype must be auto for policy sparse, got int8",
        ),
        (("--pool", "full:sink=2"), "--pool full:sink=2: num_sink is not an option of policy full"),
        (
            ("--pool", "snapstream:capacity=4"),
            "--pool snapstream:capacity=4: slot_capacity must be at least 67 for policy",
        ),
        (("--pool", "full:name=a b"), "--pool full:name=a b: name must be up to 64 letters"),
        (
            ("--pool", "full", "full:slots=2"),
            "--pool: 2 pools have the name full; choose others by the key name",
        ),
        (
            ("--pool", "full", "--num-sink", "3"),
            "--num-sink describes the slots of a single pool; with --pool",
        ),
    ],
)
def test_an_invalid_pool_is_reported_with_its_flag(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match="^" + re.escape(message)):
        config_of(*flags)


def test_a_chat_template_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ tools }}é", "utf-8")
    assert config_of().chat_template is None
    assert config_of("--chat-template", str(file)).chat_template == "{{ tools }}é"
    assert config_of(SNAPSERVE_CHAT_TEMPLATE=str(file)).chat_template == "{{ tools }}é"
    with pytest.raises(OptionError, match="--chat-template"):
        config_of("--chat-template", str(tmp_path / "none"))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="--chat-template"):
        config_of("--chat-template", str(file))


def test_sizes_are_not_compared_with_a_length_that_the_model_chooses() -> None:
    assert config_of("--policy", "sparse", "--num-recent", "20000").backend.config.max_model_len is None
