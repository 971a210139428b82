"""Loads against scripted servers."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from commands.cli import main
from commands.loadtest.answer import Answer, Failure
from commands.loadtest.arrivals import arrival_times
from commands.loadtest.config import Address, Load
from commands.loadtest.probe import probe
from commands.loadtest.prompts import Prompt
from commands.loadtest.run import Run, run_load
from commands.loadtest.target import Target, TargetError
from tests.commands.loadtest.scripted import DONE, Reply, ScriptedServer, event, scripted, text, usage, whole


def always(_index: int, _body: dict[str, Any]) -> Reply:
    return Reply(whole())


async def load(
    server: ScriptedServer,
    count: int,
    max_concurrency: int | None = None,
    time_limit: float = 30.0,
    arrivals: list[float] | None = None,
) -> Run:
    prompts = [Prompt((300, 301, index), 3) for index in range(count)]
    target = Target(Address(server.url, model="scripted"), ignore_eos=True)
    return await run_load(
        target, prompts, arrivals or [0.0] * count, max_concurrency, time_limit, lambda _went_well: None
    )


def reasons(run: Run) -> list[str]:
    return [outcome.reason if isinstance(outcome, Failure) else "" for outcome in run.outcomes]


async def test_a_request_has_the_documented_fields_and_headers() -> None:
    with scripted(always) as server:
        address = Address(
            server.url, "/v1/completions", "m", "secret", {"top_k": 5, "max_tokens": 9, "temperature": None}
        )
        outcome = await Target(address, ignore_eos=True).ask(Prompt((300, 301), 3))
    assert isinstance(outcome, Answer)
    assert (outcome.num_input_tokens, outcome.num_output_tokens, len(outcome.contents)) == (7, 3, 3)
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [300, 301],
            "max_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "top_k": 5,
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_latencies_are_no_shorter_than_the_delays_of_the_server() -> None:
    with scripted(lambda _index, _body: Reply(whole(num_output=3), delay=0.02)) as server:
        run = await load(server, 2)
    for outcome in run.outcomes:
        assert isinstance(outcome, Answer)
        assert outcome.ttft is not None
        assert outcome.ttft >= 0.02
        assert sum(outcome.itls) >= 0.04 - 0.02  # a late first piece may come together with the second
        assert outcome.e2el >= 6 * 0.02
    assert run.duration >= 6 * 0.02


async def test_each_kind_of_failure_has_its_reason() -> None:
    replies = {
        0: Reply(whole()),
        1: Reply([b'{"error": {"message": "queue full"}}'], status=429),
        2: Reply([b"busy"], status=503),
        3: Reply([text("a")], is_cut=True),
        4: Reply([text("a"), event({"error": {"message": "engine died"}})]),
        5: Reply([text("a"), DONE]),
        6: Reply([text("a", "length"), DONE]),
        7: Reply([b""], status=302),
    }
    with scripted(lambda _index, body: replies[body["prompt"][2]]) as server:
        run = await load(server, 8)
    assert reasons(run) == [
        "",
        "HTTP 429",
        "HTTP 503",
        "connection cut",
        "error in stream",
        "stream ended early",
        "no usage in stream",
        "HTTP 302",
    ]
    refused = run.outcomes[1]
    assert isinstance(refused, Failure)
    assert "queue full" in refused.detail


async def test_an_answer_ends_even_if_its_connection_stays_open() -> None:
    replies = {0: Reply(whole(), is_kept_open=True), 1: Reply([b"full"], status=429, is_kept_open=True)}
    with scripted(lambda _index, body: replies[body["prompt"][2]]) as server:
        run = await load(server, 2)
    assert reasons(run) == ["", "HTTP 429"]


async def test_a_closed_loop_keeps_exactly_max_concurrency_requests_open() -> None:
    """The barrier holds all replies until three requests are open. `most_open` would show a fourth."""
    barrier = threading.Barrier(3)

    def choose(_index: int, _body: dict[str, Any]) -> Reply:
        barrier.wait(timeout=20)
        return Reply(whole())

    with scripted(choose) as server:
        run = await load(server, 9, max_concurrency=3)
    assert reasons(run) == [""] * 9
    assert server.most_open == 3


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """The barrier holds all replies until all requests have arrived."""
    barrier = threading.Barrier(6)

    def choose(_index: int, _body: dict[str, Any]) -> Reply:
        barrier.wait(timeout=20)
        return Reply(whole())

    arrivals = arrival_times(6, 200.0, 1.0, "0")
    with scripted(choose) as server:
        run = await load(server, 6, arrivals=arrivals)
    assert reasons(run) == [""] * 6
    assert run.duration >= arrivals[-1]


async def test_a_run_ends_at_its_time_limit_and_unfinished_requests_fail() -> None:
    hold = threading.Event()

    def choose(_index: int, body: dict[str, Any]) -> Reply:
        if body["prompt"][2] > 0:
            hold.wait(timeout=20)
        return Reply(whole())

    with scripted(choose) as server:
        run = await load(server, 4, max_concurrency=1, time_limit=1.0)
        hold.set()
    assert reasons(run) == ["", "time limit", "time limit", "time limit"]
    assert len(server.bodies) == 2


async def test_progress_is_called_for_every_request() -> None:
    reported: list[bool] = []
    with scripted(lambda index, _body: Reply(whole()) if index else Reply([b""], status=500)) as server:
        target = Target(Address(server.url, model="scripted"), ignore_eos=False)
        await run_load(target, [Prompt("a", 1)] * 3, [0.0] * 3, None, 30.0, reported.append)
    assert sorted(reported) == [False, True, True]


async def test_a_server_that_refuses_connections_is_a_failure_of_each_request() -> None:
    with scripted(always) as server:
        pass
    assert reasons(await load(server, 2)) == ["connection: ConnectionRefusedError"] * 2


def accepts_text_only(_index: int, body: dict[str, Any]) -> Reply:
    """Count two tokens for each word and ten more, as a server with a chat template may."""
    content = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    if not isinstance(content, str):
        return Reply([b'{"error": "prompt must be a string"}'], status=422)
    return Reply(whole(num_input=2 * len(content.split()) + 10))


async def test_words_are_scaled_by_the_token_counts_of_the_server() -> None:
    with scripted(accepts_text_only) as server:
        target = Target(Address(server.url), ignore_eos=False)
        (form,) = await probe([target], Load())
    assert target.model == "scripted"
    assert form is not None
    assert (form.overhead, form.tokens_per_word) == (10, 2)


async def test_two_servers_get_prompts_of_one_form() -> None:
    with scripted(always) as tokens, scripted(accepts_text_only) as words:
        first, second = (Target(Address(server.url), ignore_eos=False) for server in (tokens, words))
        with pytest.raises(TargetError, match="counts 7 tokens for 32 words and 7 for 256"):
            await probe([first, second], Load())
        assert await probe([first], Load()) == [None]


async def test_a_busy_server_is_not_mistaken_for_one_without_token_prompts() -> None:
    with (
        scripted(lambda _index, _body: Reply([b"busy"], status=503)) as server,
        pytest.raises(TargetError, match="HTTP 503 busy"),
    ):
        await probe([Target(Address(server.url), ignore_eos=False)], Load())
    assert len(server.bodies) == 1


def run_bench(server: ScriptedServer, *options: str) -> int:
    return main(
        ["bench", "--base-url", server.url, "--num-prompts", "4", "--random-input-len", "8", *options]
    )


def half_refused(_index: int, body: dict[str, Any]) -> Reply:
    return (
        Reply(whole()) if body["max_tokens"] == 1 or body["prompt"][0] % 2 else Reply([b"full"], status=429)
    )


def test_failures_set_the_exit_status_unless_they_are_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    with scripted(half_refused) as server:
        assert run_bench(server, "--num-prompts", "40", "--json", str(file)) == 1
        result = json.loads(file.read_text())
        assert run_bench(server, "--num-prompts", "40", "--allow-failures") == 0
    refused = sum(1 for body in server.bodies[1:41] if body["prompt"][0] % 2 == 0)
    assert 0 < refused < 40
    assert (result["completed"], result["failed"]) == (40 - refused, refused)
    assert result["failures"] == {"HTTP 429": refused}
    assert f"{refused} × HTTP 429: full" in capsys.readouterr().out


def test_warm_ups_are_sent_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(always) as server:
        assert run_bench(server, "--num-warmups", "3", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 4
    assert len(server.bodies) == 1 + 3 + 4


def test_an_unreachable_server_is_an_error_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(always) as server:
        pass
    assert run_bench(server) == 1
    assert "cannot be reached: ConnectError" in capsys.readouterr().err


def test_two_servers_are_loaded_in_turns_with_the_same_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    order: list[str] = []

    def named(name: str, num_output: int) -> Any:
        def choose(_index: int, body: dict[str, Any]) -> Reply:
            if body["max_tokens"] > 1:
                order.append(name)
            return Reply((*[text("a")] * 2, text("", "stop"), usage(8, num_output), DONE))

        return choose

    with scripted(named("A", 6)) as base, scripted(named("B", 3)) as compare:
        turns = ("--compare", compare.url, "--rounds", "2", "--max-concurrency", "1")
        assert run_bench(base, *turns, "--json", str(file)) == 0
    assert "".join(order) == "AAAABBBBBBBBAAAA"
    assert [body["prompt"] for body in base.bodies] == [body["prompt"] for body in compare.bodies]
    assert len({tuple(body["prompt"]) for body in base.bodies[1:]}) == 8
    result = json.loads(file.read_text())
    assert result["ratios"]["total_output_tokens"] == 2
    assert [run["total_output_tokens"] for run in result["compare"]["runs"]] == [12, 12]
    assert result["compare_url"] == compare.url
    assert "ratio" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--request-rate", "0"], "--request-rate must be a number above 0"),
        (["--random-range-ratio", "1"], "--random-range-ratio must be a number from 0 to below 1"),
        (["--metric-percentiles", "99,101"], "--metric-percentiles must be percentiles between 0 and 100"),
        (["--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--base-url", "127.0.0.1:8000"], "--base-url must be a URL like"),
        (
            ["--endpoint", "/v1/chat/completions", "--prompt-format", "tokens"],
            "--prompt-format tokens does not go with --endpoint",
        ),
        (["--api-key", "a\nb"], "--api-key must be printable ASCII"),
        (["--endpoint", "/v1/a completions"], "--endpoint must be a path like"),
        (["--endpoint", "/v1/embeddings"], "--endpoint must be a path like"),
        (
            ["--json", "/nowhere/at/all.json"],
            "--json must be a file that can be written, got '/nowhere/at/all.json'",
        ),
        (
            ["--plot", "latencies.gif"],
            "--plot must be a file that ends in .png, .svg, .pdf, got 'latencies.gif'",
        ),
    ],
)
def test_invalid_options_are_refused_by_name(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(always) as server:
        assert run_bench(server, *options) == 2
    assert message in capsys.readouterr().err


def test_options_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SNAPSERVE_BENCH_RANDOM_OUTPUT_LEN", "77")
    monkeypatch.setenv("SNAPSERVE_MODEL", "/the/path/of/serve")
    with scripted(always) as server:
        assert run_bench(server, "--json", "-") == 0
    assert {body["max_tokens"] for body in server.bodies[1:]} == {77}
    assert json.loads(capsys.readouterr().out)["model_id"] == "scripted"
