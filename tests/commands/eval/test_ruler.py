"""`snapserve eval ruler` with the engine that it starts, with running servers, and with a losing control."""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from backends.fake import slot_pool
from cache.policy import PolicyName, full, snapstream
from cache.scorer import WindowScorer
from commands.cli import main
from commands.eval.errors import EvalError
from commands.eval.options import EVAL_MODEL, Pack
from commands.eval.prompts import load_tokenizer
from commands.eval.ruler import RulerConfig, measure
from commands.eval.setting import settings_of
from commands.eval.target import EMBEDDED, Target
from commands.eval.tasks.case import Case, Scoring, TokenCounter
from examples.demo_model.corpus import make_case
from server.options.models import DEMO_MODEL, DEMO_MODEL_NAME
from server.text.renderer import Renderer
from server.version import server_version
from tests.commands.loadtest.scripted import Reply, scripted
from tests.server.serving import MODEL, RunningServer, serve, spec

DOCS = Path(__file__).parents[3] / "docs"
SMALL = ("--num-cases", "2", "--length", "600", "--tasks", "niah_single_1", "qa_1")


def test_its_own_engine_answers_from_packed_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    options = ("--compression", "4", "--serve-options=--no-compile", "--plot", str(plot), "--json")
    assert main(["eval", "ruler", *SMALL, *options]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    run = result["runs"][0]
    assert (result["model"], result["version"], result["from_packed_slot"]) == (
        "eval_model",
        server_version(),
        True,
    )
    assert (result["mean"], set(result["scores"])) == (run["mean"], {"niah_single_1", "qa_1"})
    assert (run["policy"], run["compression"], run["packed_share"]) == ("snapstream", 4, 1)
    assert [len(task["scores"]) for task in run["tasks"].values()] == [2, 2]
    assert "snapstream 4x" in output.err
    assert "<svg" in plot.read_text()


def test_results_survive_a_later_setting_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, num_asked = tmp_path / "result.json", 2 * 2 + 1  # the cases, and what finds out what a server can

    def answer(number: int, _: dict[str, Any]) -> Reply:
        if number >= num_asked:
            return Reply([b"out of order"], status=500)
        cache = {"policy": "a", "kept_tokens": 3, "evicted_tokens": 1, "packed_completion_tokens": 1}
        usage = {"prompt_tokens": 4, "completion_tokens": 1, "cache": cache}
        return Reply([json.dumps({"choices": [{"text": " no"}], "usage": usage}).encode()])

    with scripted(answer) as server:
        asked = ("--base-url", server.url, "--tokenizer", str(EVAL_MODEL), "--cache-policy", "a", "b")
        assert main(["eval", "ruler", *SMALL, *asked, "--json", str(file)]) == 1
    assert "snapserve eval: b: " in capsys.readouterr().err
    assert [run["label"] for run in json.loads(file.read_text())["runs"]] == ["a"]


@dataclass(frozen=True)
class Retrieval:
    """What the embedded model was trained for, as a task."""

    name: str = "retrieval"

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        case = make_case(rng.randrange(10**6), num_tokens - 40, count_tokens)
        return Case(
            self.name, f"{case.document}\n\n", case.question, "", case.answer, (case.answer,), Scoring.ALL
        )


@pytest.mark.long
def test_the_sink_only_control_loses_heavily() -> None:
    """If answers read anything but the packed slot, the control would score as well as the policy."""
    config = RulerConfig(
        target=Target(
            str(DEMO_MODEL),
            length=1024,
            concurrency=8,
            # The default's window of 256 would be the whole slot: 69 of 100 instead of 94.
            serve_options=("--selection-options", "observation-window=32", "--no-compile"),
        ),
        settings=settings_of([PolicyName.SNAPSTREAM], [4.0], has_control=True),
        tasks=[Retrieval()],
        num_cases=16,
        seed=0,
        pack=Pack.BEFORE_ANSWER,
        uses_chat_template=True,
    )
    result = asyncio.run(measure(config))
    snapstream, control = (run.mean for run in result.runs)
    assert result.is_packed
    assert snapstream >= 80
    assert control <= 10


def test_a_running_server_is_measured_with_its_slots(
    running: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "eval",
                "ruler",
                *SMALL,
                "--base-url",
                running.url,
                "--tokenizer",
                str(DEMO_MODEL),
                "--json",
                "-",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["runs"][0]["label"], result["runs"][0]["policy"], result["from_packed_slot"]) == (
        "as served",
        None,
        True,
    )
    assert result["mean"] == 0  # it makes tokens up


@pytest.fixture(scope="module")
def pooled(renderer: Renderer) -> Iterator[RunningServer]:
    small = slot_pool(2, snapstream(2, 32, 40, WindowScorer(observation_window=4)), 1024)
    with serve(renderer, backend_spec=spec(pools=(small, slot_pool(1, full(1024), 1024, "exact")))) as server:
        yield server


def test_pools_of_a_server_are_selected_and_reported_by_name(
    pooled: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (
        "--base-url",
        pooled.url,
        "--tokenizer",
        str(DEMO_MODEL),
        "--cache-policy",
        "snapstream",
        "exact",
    )
    assert main(["eval", "ruler", *SMALL, *asked, "--json"]) == 0
    output = capsys.readouterr()
    small, whole = json.loads(output.out)["runs"]
    assert [(run["label"], run["cache"]["pools"]) for run in (small, whole)] == [
        ("snapstream", ["snapstream"]),
        ("exact", ["exact"]),
    ]
    assert small["cache"]["kept_tokens"] == 4 * 74
    assert small["cache"]["compression"] == pytest.approx(600 / 74, rel=0.1)
    assert (whole["cache"]["evicted_tokens"], whole["cache"]["compression"]) == (0, 1)
    assert "exact: no token was evicted" in output.err
    assert "snapstream, exact: " not in output.err


def test_an_exact_pool_is_not_reported_as_compressed(
    pooled: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompts' lengths select the pool with the whole cache. Both facts are printed."""
    asked = (
        "--base-url",
        pooled.url,
        "--tokenizer",
        str(DEMO_MODEL),
        "--policy",
        "snapstream",
        "--compression",
        "4",
    )
    assert main(["eval", "ruler", *SMALL, *asked, "--json"]) == 0
    output = capsys.readouterr()
    assert "--policy, --compression: of no effect on" in output.err
    assert "as served: no token was evicted" in output.err
    assert json.loads(output.out)["runs"][0]["cache"]["pools"] == ["exact"]


def test_an_unknown_pool_is_reported(pooled: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--base-url", pooled.url, "--tokenizer", str(DEMO_MODEL), "--cache-policy", "large")
    assert main(["eval", "ruler", *SMALL, *asked]) == 1
    assert (
        "'cache_policy' must be one of this server's snapstream, exact, got 'large'"
        in capsys.readouterr().err
    )


def test_the_tokenizer_is_found_by_the_model_name(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Target(str(EVAL_MODEL), 512, 1, base_url=running.url, served_model_name=DEMO_MODEL_NAME)
    assert asked.load_tokenizer().info == load_tokenizer(str(DEMO_MODEL)).info
    with pytest.raises(EvalError, match=r"no/such/model cannot be read.*: name one by --tokenizer"):
        replace(asked, served_model_name="no/such/model").load_tokenizer()
    monkeypatch.setitem(EMBEDDED, MODEL, str(DEMO_MODEL))
    first_listed = replace(asked, served_model_name=None).load_tokenizer()
    assert first_listed.info == load_tokenizer(str(DEMO_MODEL)).info


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_server_without_the_extension_is_reported_as_not_packed(
    is_strict: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(_: int, body: dict[str, Any]) -> Reply:
        if is_strict and "num_prefill_tokens" in body:
            return Reply([b'{"error": {"message": "unknown field"}}'], status=400)
        usage = {"prompt_tokens": 4, "completion_tokens": 1}
        return Reply([json.dumps({"choices": [{"text": " no"}], "usage": usage}).encode()])

    with scripted(answer) as server:
        asked = ("--base-url", server.url, "--tokenizer", str(EVAL_MODEL), "--api-key", "mine")
        assert main(["eval", "ruler", *SMALL, *asked, "--json", "-"]) == 0
    output = capsys.readouterr()
    assert "These figures do not come from packed slots alone" in output.err
    assert json.loads(output.out)["from_packed_slot"] is False
    assert all(headers["Authorization"] == "Bearer mine" for headers in server.headers)
    assert not any("num_prefill_tokens" in body for body in server.bodies[-4:])


def test_a_failing_server_ends_the_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(lambda _, __: Reply([b"out of order"], status=500)) as server:
        assert main(["eval", "ruler", *SMALL, "--base-url", server.url, "--tokenizer", str(EVAL_MODEL)]) == 1
    assert "snapserve eval: as served: " in capsys.readouterr().err


def test_an_engine_that_does_not_start_is_reported_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    assert main(["eval", "ruler", *SMALL, "--model", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "snapserve eval: the engine did not start" in error
    assert "safetensors" in error


def test_a_model_without_a_tokenizer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "ruler", *SMALL, "--model", str(tmp_path)]) == 1
    assert f"snapserve eval: the tokenizer of {tmp_path} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", "needle"), "--tasks must be one of niah_single_1, "),
        (("--compression", "0.5"), "--compression must be a number of at least 1, got '0.5'"),
        (("--length", "128", "--tasks", "fwe"), "--length 128 is too short: fwe needs at least"),
        (("--serve-options=--pools 2",), "--serve-options has --pools 2"),
        (
            ("--base-url", "http://127.0.0.1:1", "--serve-options=--num-sink 2"),
            "--serve-options does not go with --base-url",
        ),
        (("--cache-policy", "full"), "--cache-policy needs the --base-url"),
        (("--json", "/nowhere/at/all.json"), "--json must be a file that can be written"),
        (("--plot", "scores.gif"), "--plot must be a file that ends in .png, .svg, .pdf"),
        (
            ("--num-cases", "1", "--tasks", "passkey", "--compression", "2000"),
            "2 entries: --slot-capacity must be at least 67 ",
        ),
    ],
)
def test_invalid_options_are_refused_before_any_work(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "ruler", *options]) == 2
    assert message in capsys.readouterr().err


def test_variables_differ_from_those_of_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SNAPSERVE_EVAL_TASKS", "qa_1,needle")
    assert main(["eval", "ruler"]) == 2
    assert "SNAPSERVE_EVAL_TASKS must be one of" in capsys.readouterr().err
