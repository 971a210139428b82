"""Real server processes in the middle of a batch: killed, restarted, terminated, and two that share one."""

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from tests.e2e.process import Server, serve
from tests.server.batches.inputs import answers, jsonl, line

NUM_LINES = 300


def wait_for(sdk: openai.OpenAI, batch: Batch, num_completed: int) -> Batch:
    while (
        now := sdk.batches.retrieve(batch.id)
    ).request_counts is None or now.request_counts.completed < num_completed:
        assert now.status in ("validating", "in_progress")
        time.sleep(0.02)
    return now


def end(server: Server, ending: signal.Signals) -> None:
    server.process.send_signal(ending)
    assert server.process.wait(timeout=60) == (0 if ending is signal.SIGTERM else -ending)


@pytest.mark.long
def test_a_batch_survives_its_process(tmp_path: Path) -> None:
    options = ("--backend", "fake", "--batch-dir", str(tmp_path / "kept"))
    lines = [line(f"r{number}", model="snapserve-demo", max_tokens=32) for number in range(NUM_LINES)]
    written = [b""]
    with (
        serve(*options, log=tmp_path / "first") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as sdk,
    ):
        file = sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        batch = sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_for(sdk, batch, 20)
        end(server, signal.SIGKILL)
    journal = tmp_path / "kept" / "batches" / batch.id / "output.jsonl"
    written.append(journal.read_bytes().rpartition(b"\n")[0] + b"\n")
    with (
        serve(*options, log=tmp_path / "second") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as sdk,
    ):
        wait_for(sdk, batch, written[-1].count(b"\n") + 20)
        end(server, signal.SIGTERM)
    written.append(journal.read_bytes())
    assert 20 <= written[1].count(b"\n") < written[2].count(b"\n") < NUM_LINES
    with (
        serve(*options, log=tmp_path / "third") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as sdk,
    ):
        while (ended := sdk.batches.retrieve(batch.id)).status != "completed":
            assert ended.status in ("in_progress", "finalizing")
            time.sleep(0.02)
        content = sdk.files.content(str(ended.output_file_id)).read()
    assert all(content.startswith(part) for part in written)
    assert set(answers(content)) == {f"r{number}" for number in range(NUM_LINES)}
    assert ended.request_counts is not None
    assert (ended.error_file_id, ended.request_counts.total, ended.request_counts.completed) == (
        None,
        NUM_LINES,
        NUM_LINES,
    )


def runner_of(batch: Batch, folder: Path, servers: list[Server]) -> Server:
    """Return the server that holds the batch's lock."""
    inode = str((folder / "batches" / batch.id / "lock").stat().st_ino)
    while True:
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        pids = {int(lock[4]) for lock in locks if lock[1] == "FLOCK" and lock[5].endswith(f":{inode}")}
        for server in servers:
            if server.process.pid in pids:
                return server


@pytest.mark.long
def test_replicas_lose_and_repeat_no_line_when_they_are_killed(tmp_path: Path) -> None:
    """Three replicas with one folder: the one that runs the batch is killed, then the next one too."""
    folder = tmp_path / "kept"
    options = ("--backend", "fake", "--batch-dir", str(folder), "--batch-concurrency", "1")
    lines = [line(f"r{number}", model="snapserve-demo", max_tokens=64) for number in range(NUM_LINES)]
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(3) as executor:
            logs = [tmp_path / name for name in ("a", "b", "c")]
            servers = list(executor.map(lambda log: stack.enter_context(serve(*options, log=log)), logs))
        clients = {
            server.url: stack.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key="any"))
            for server in servers
        }
        sdk = clients[servers[0].url]
        file = sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        batch = sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        num_before = 0
        while len(servers) > 1:
            sdk = clients[servers[-1].url]
            wait_for(sdk, batch, num_before + 20)
            runs = runner_of(batch, folder, servers)
            end(runs, signal.SIGKILL)
            servers.remove(runs)
            num_before = (folder / "batches" / batch.id / "output.jsonl").read_bytes().count(b"\n")
            assert 20 <= num_before < NUM_LINES
        sdk = clients[servers[0].url]
        while (ended := sdk.batches.retrieve(batch.id)).status != "completed":
            assert ended.status in ("in_progress", "finalizing")
            time.sleep(0.02)
        content = sdk.files.content(str(ended.output_file_id)).read()
    assert set(answers(content)) == {f"r{number}" for number in range(NUM_LINES)}
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed) == (NUM_LINES, NUM_LINES)
