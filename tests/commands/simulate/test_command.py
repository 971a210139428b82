"""The command line of `simulate`: its outputs, files and error messages."""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import pytest

from commands.simulate.command import configure, run
from server.options.command_line import OptionError


def simulate(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    configure(parser)
    return run(parser.parse_args(arguments))


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    simulate(*arguments, "--json")
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert values["simulated"] is True
    return values


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--machine", "h100", "--context", "2048", "--requests", "20", "--max-tpot", "0.01"),
        ("sweep", "--batches", "1", "--contexts", "8192", "--sockets", "16"),
        ("step", "--model", "deepseek-r1"),
        ("replay", "--requests", "20", "--rate", "5", "--shape", "poisson"),
    ],
)
def test_every_answer_says_that_it_is_simulated(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert simulate(*arguments) == 0
    assert capsys.readouterr().out.startswith("simulated: true\n")


def test_plan_says_which_limit_no_deployment_meets() -> None:
    options = "plan --machine h100 --context 4096 --requests 20 --max-tpot 0.000001"
    with pytest.raises(
        OptionError, match=r"none of \d+ deployments meets --max-tpot 1e-06 \(best alone: 0\.00\d+\)"
    ):
        simulate(*options.split())
    # One limit is met by a request alone, so only the other is named.
    with pytest.raises(OptionError, match=r"deployments meets --max-ttft 1e-06 \(best alone: 0\.\d+\)$"):
        simulate(*options.split()[:-2], "--max-ttft", "0.000001", "--max-tpot", "1")


def test_sweep_has_a_row_for_each_combination(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "sweep.png"
    options = ["sweep", "--model", "deepseek-r1", "--batches", "1,64", "--contexts", "131072"]
    rows = json_of(capsys, *options, "--plot", str(plot))["rows"]
    assert len(rows) == 2 * 2 * 2 * 2
    assert any(row.get("missing_bytes_per_socket", 0) > 1e9 for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_step_writes_a_trace_of_the_same_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    options = ["step", "--model", "deepseek-r1", "--batch", "64", "--slot-capacity", "32768"]
    values = json_of(capsys, *options, "--chrome-trace", str(trace))
    written = json.loads(trace.read_text())
    assert written["otherData"]["simulated"] is True
    assert max(event.get("ts", 0) + event.get("dur", 0) for event in written["traceEvents"]) == pytest.approx(
        1e6 * values["seconds"]
    )
    assert json_of(capsys, "step", "--prefill", "4096")["seconds"] > 0


def test_replay_reads_a_trace_and_writes_its_series(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, series = tmp_path / "trace.jsonl", tmp_path / "series.csv"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 1000 * index, "input_length": 50, "output_length": 20}) + "\n"
            for index in range(150)
        )
    )
    files = ("--trace", str(trace), "--series", str(series), "--plot", str(tmp_path / "replay.png"))
    values = json_of(capsys, "replay", *files)
    assert (values["requests"], values["output_tokens"]) == (150, 3000)
    assert values["simulated_seconds"] == pytest.approx(149, abs=1)
    assert 0 < values["tpot_seconds"]["p50"] <= values["tpot_seconds"]["p99"]
    with series.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["simulated_seconds"]) for row in rows] == [0.0, 60.0, 120.0]


def test_replay_begins_with_a_dated_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = [f"2024-05-10 00:00:{second:02d}.000000,50,20" for second in range(10, 20)]
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    values = json_of(capsys, "replay", "--trace", str(trace))
    assert values["requests"] == 10
    assert values["simulated_seconds"] == pytest.approx(9, abs=1)


@pytest.mark.parametrize(
    "text",
    [
        '{"time": 0, "num_prompt_tokens": 1e999, "num_output_tokens": 1}',
        '{"time": ' + "[" * 100_000,
    ],
)
def test_a_malformed_trace_is_an_option_error(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    with pytest.raises(OptionError):
        simulate("replay", "--trace", str(trace))


@pytest.mark.long  # every figure with every parameter changed
def test_reproduce_fails_while_a_prediction_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert simulate("reproduce", "--json", "--plots", str(tmp_path)) == 1
    values = json.loads(capsys.readouterr().out)
    failed = {figure["figure"] for figure in values["figures"] if figure["kind"] == "prediction"}
    assert values["failed"]
    assert set(values["failed"]) < failed
    assert len(list(tmp_path.glob("*.png"))) == 5
    count = f"[{len(failed) - len(values['failed'])} of {len(failed)}]"
    assert count in (Path(__file__).parents[3] / "README.md").read_text(), count


def test_a_step_has_the_range_of_what_is_not_published(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ((), ("--prefill", "4096")):
        values = json_of(capsys, "step", "--batch", "4", *kind)
        assert 0 < values["seconds_low"] < values["seconds"] < values["seconds_high"]
    # As published: 10 ms for an 8B on 16 sockets.
    assert values["switch_seconds"] == pytest.approx(0.01, rel=0.05)
    assert "switch_seconds" not in json_of(capsys, "step", "--machine", "cpu", "--model", "qwen3-0.6b")


def test_weights_and_caches_have_types_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A token's time at batch 1 is that of the weights, at 64 long slots that of the cache."""

    def seconds(*options: str) -> float:
        found: float = json_of(capsys, "step", "--machine", "h200", "--sockets", "1", *options)["hbm_bytes"]
        return found

    many = ("--batch", "8", "--slot-capacity", "100000")
    weights = seconds() / seconds("--weight-dtype", "int8")
    assert 1.7 < weights < 2
    assert seconds("--weight-dtype", "bfloat16") == seconds()
    assert 1.7 < seconds(*many) / seconds(*many, "--kv-cache-dtype", "int8", "--weight-dtype", "int8") < 2
    plan = "plan --machine h100 --policy full --context 2000 --mean-output 20 --requests 20"
    assert simulate(*plan.split(), "--weight-dtype", "int8", "--kv-cache-dtype", "int8") == 0
    out = capsys.readouterr().out
    served, replayed = out.splitlines()[-2:]
    assert served.startswith("snapserve serve --model MODEL")
    assert "--kv-cache-dtype int8 --quantization int8" in served
    assert "--weight-dtype int8 --kv-cache-dtype int8" in replayed


def test_sweeps_and_replays_have_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batches", "4", "--contexts", "8192", "--sockets", "16", "--policy", "full")
    for row in json_of(capsys, "sweep", *options)["rows"]:
        low, high = row["tpot_seconds_range"]
        assert low < row["tpot_seconds"] < high
    options = ("--requests", "30", "--rate", "5", "--shape", "poisson", "--num-slots", "4")
    plain = json_of(capsys, "replay", *options)
    ranged = json_of(capsys, "replay", *options, "--range")
    assert plain["ranges"].keys() == {"machine_seconds_per_request"}
    for measure in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
        assert ranged[measure] == plain[measure]
        low, high = ranged["ranges"][f"{measure}_p50"]
        assert low < ranged[measure]["p50"] < high
    # 30 requests in 6 s: the rate is that of the arrivals, but for the slowest machine.
    low, high = ranged["ranges"]["output_tokens_per_second"]
    assert low < ranged["output_tokens_per_second"] * 1.001 <= high * 1.001


def test_the_range_of_a_replay_covers_all_that_the_machine_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Other models, drafts and stored prompts take their part of a mean request."""

    def ends(*arguments: str) -> tuple[float, float]:
        options = ("replay", "--requests", "40", "--shape", "poisson", "--no-varies", *arguments)
        low, high = json_of(capsys, *options)["ranges"]["machine_seconds_per_request"]
        return low, high

    common = ("--mean-prompt", "8000", "--mean-output", "50")
    low, high = ends(*common)
    small_low, small_high = ends("--model", "llama-3.2-1b", *common)
    both_low, both_high = ends(*common, "--other-models", "llama-3.2-1b")
    assert both_low == pytest.approx((low + small_low) / 2)
    assert both_high == pytest.approx((high + small_high) / 2)
    shortened = ends(
        *common, "--speculative-prefill-model", "llama-3.2-1b", "--speculative-prefill-keep", "1024"
    )
    assert small_low < shortened[0] < low
    assert small_high < shortened[1] < high
    assert ends(*common, "--draft-model", "llama-3.2-1b", "--acceptance", "0.8")[0] != low

    lines = [
        {
            "timestamp": 1000 * i,
            "input_length": 8000,
            "output_length": 50,
            "hash_ids": [*range(14), 100 + i, i],
        }
        for i in range(40)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    restored = json_of(capsys, "replay", "--trace", str(trace))["ranges"]["machine_seconds_per_request"]
    assert restored[1] < 0.7 * high


def test_step_draws_its_bandwidth(tmp_path: Path) -> None:
    assert simulate("step", "--execution", "looped", "--plot", str(tmp_path / "step.png")) == 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_replay_without_served_requests_is_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    values = json_of(capsys, "replay", "--requests", "3", "--max-model-len", "10", "--policy", "full")
    assert (values["refused"], values["ttft_seconds"]["p99"]) == (3, None)


def test_a_flag_overrides_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SNAPSERVE_SIMULATE_BATCHES", "2,4")
    monkeypatch.setenv("SNAPSERVE_SIMULATE_EXECUTIONS", "looped")
    rows = json_of(
        capsys, "sweep", "--contexts", "4096", "--sockets", "16", "--policy", "full", "--batches", "8"
    )["rows"]
    assert [(row["batch"], row["execution"]) for row in rows] == [(8, "looped")]
    monkeypatch.setenv("SNAPSERVE_SIMULATE_BATCHES", "two")
    with pytest.raises(
        OptionError,
        match=r"SNAPSERVE_SIMULATE_BATCHES must be a whole number of at least 1, or several .* got 'two'",
    ):
        simulate("sweep")


def test_a_sweep_of_sparse_holds_every_token_in_less_memory(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--contexts", "131072", "--sockets", "16", "--batches", "4", "--executions", "looped")
    full, sparse = json_of(capsys, "sweep", *options, "--policy", "full,sparse")["rows"]
    assert sparse["slot_capacity"] == full["slot_capacity"] == 131072
    assert sparse["store"] == {"num_tokens": 130944, "num_attended": 4096}
    slots = [row["bytes_per_socket"]["HBM"]["slots"] for row in (sparse, full)]
    assert slots[0] / slots[1] == pytest.approx((130944 * 136 + 128 * 512) / (131072 * 512))
    assert sparse["tpot_seconds"] < full["tpot_seconds"]


def test_replay_and_plan_know_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--mean-prompt", "30000", "--mean-output", "50", "--policy", "sparse", "--sockets", "8")
    slots = ("--max-model-len", "32768", "--num-slots", "4", "--no-varies")
    replay = json_of(capsys, "replay", *load, *slots, "--requests", "30")
    assert replay["requests"] == 30
    plan = json_of(capsys, "plan", *load, "--context", "32768", "--requests", "30")
    assert {row["policy"] for row in plan["options"]} == {"sparse"}


def test_a_sweep_names_the_memory_that_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(capsys, "sweep", "--model", "llama-3.1-405b", "--machine", "dgx-h100", "--batches", "1")[
        "rows"
    ]
    assert {row["missing_tier"] for row in rows} == {"HBM"}
    assert {row["execution"] for row in rows} == {"fused"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, got 0"),
        ({"model_type": "bert"}, "model_type must be one of .*got 'bert'"),
    ],
)
def test_a_config_that_cannot_be_is_an_option_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = (
        json.loads(Path("backends/sn40l/description/data/models/llama-3.1-8b.json").read_text()) | changes
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    for question in ("plan", "sweep", "step", "replay"):
        with pytest.raises(OptionError, match=f"--model must be a model .*{message}"):
            simulate(question, "--model", str(tmp_path))


def test_default_is_all_sockets_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(
        capsys, "sweep", "--machine", "h100", "--executions", "fused", "--contexts", "4096", "--batches", "1"
    )["rows"]
    assert {row["num_sockets"] for row in rows} == {1}
    assert simulate("step", "--machine", "dgx-h100") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--model", "gpt-9"), "--model must be a model .*there are deepseek-r1.*got 'gpt-9'"),
        (("plan", "--model", "/nowhere/config.json"), "--model must be a config.json that can be read"),
        (("plan", "--machine", "gpu"), "--machine must be a machine .*dgx-h100"),
        (("plan", "--max-ttft", "-1"), "--max-ttft must be a number above 0, got '-1'"),
        (("plan", "--context", "300", "--mean-output", "300"), "--context must hold a prompt and an answer"),
        (("plan", "--trace", "/dev/null"), "--trace /dev/null has no requests"),
        (("plan", "--percentile", "101"), "--percentile must be above 0, up to 100, got '101'"),
        (("plan", "--requests", "3"), "--requests must be a whole number of at least 20"),
        (("plan", "--sockets", "4,17"), "--sockets must be from 1 to 16.*got 17"),
        (
            ("plan", "--model", "llama-3.1-405b", "--machine", "dgx-h100"),
            "405b on 8 sockets of dgx-h100 does not fit into HBM.*are missing; --nodes, --weight-dtype",
        ),
        (("replay", "--machine", "h100", "--requests", "5"), r"are missing; --num-slots 52 would fit$"),
        (("sweep", "--slot-capacity", "3"), "slot_capacity must be at least .*got 3"),
        (
            ("sweep", "--policy", "full,none"),
            "--policy must be one of full.*or several with commas, got 'none'",
        ),
        (("sweep", "--plot", "sweep.txt"), "--plot must be a file that ends in .png"),
        (
            ("step", "--chrome-trace", "/nowhere/step.json"),
            "--chrome-trace must be a file that can be written",
        ),
        (
            ("sweep", "--policy", "sparse", "--kv-cache-dtype", "int8"),
            "must be auto for policy sparse, got int8",
        ),
        (
            ("plan", "--policy", "sparse", "--draft-model", "llama-3.2-1b", "--acceptance", "0.5"),
            "--draft-model needs another policy than sparse",
        ),
        (("step", "--execution", "looped", "--machine", "h100"), "static graphs.*operators or fused"),
        (("replay", "--trace", "/nowhere.jsonl"), "--trace must be a file that can be read .*No such file"),
        (("replay", "--sockets", "17"), "--sockets must be from 1 to 16.*got 17"),
        (("replay", "--rate", "-2"), "--rate must be a number above 0, got '-2'"),
        (("replay", "--rate", "inf"), "--rate must be a number above 0, got 'inf'"),
        (("replay", "--requests", "0"), "--requests must be a whole number of at least 1, got '0'"),
        (
            ("replay", "--requests", "5", "--model", "llama-3.1-405b", "--sockets", "8"),
            "does not fit into HBM",
        ),
        (("reproduce", "--plots", __file__), "--plots must be a folder"),
        (("plan", "--context", "1000000000"), "a context must be at most 131072 tokens.*got 1000000000"),
        (("sweep", "--contexts", "200000"), "a context must be at most 131072 tokens"),
        (("step", "--prefill", "200000"), "a context must be at most 131072 tokens"),
        (("step", "--slot-capacity", "200000"), "a context must be at most 131072 tokens"),
        (("replay", "--max-model-len", "200000"), "a context must be at most 131072 tokens"),
        (("step", "--model", "deepseek-r1", "--batch", "3000"), "does not fit into HBM"),
        (("replay", "--trace", __file__, "--rate", "3"), "--rate is of drawn arrivals, and --trace has its"),
        (("replay", "--trace", "/dev/null"), "--trace /dev/null has no requests"),
        (
            ("replay", "--requests", "5", "--prefix-cache-bytes", "9"),
            "--prefix-cache-bytes needs a --trace with hash_ids",
        ),
        (("replay", "--speculative-prefill-model", "gpt-9"), "--speculative-prefill-model must be a model"),
        (
            ("replay", "--requests", "5", "--speculative-prefill-model", "deepseek-r1", "--machine", "h100"),
            "72.00 GB are free",
        ),
        (("replay", "--speculative-prefill-keep", "1.5"), "--speculative-prefill-keep must be a share"),
        (("plan", "--nodes", "2"), "no node_bandwidth"),
        (("plan", "--draft-model", "llama-3.2-1b"), "--draft-model and --acceptance need each other"),
        (
            ("replay", "--requests", "5", "--acceptance", "0.5"),
            "--draft-model and --acceptance need each other",
        ),
        (("replay", "--acceptance", "1"), "--acceptance must be a share of 0 to below 1, got '1'"),
        (("step", "--nodes", "0"), "--nodes must be a whole number of at least 1"),
    ],
)
def test_invalid_arguments_are_option_errors(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        simulate(*arguments)
