"""GGUF files as a user serves them: the conversion at the first start, chat, and errors."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.process import Server, serve
from tests.gguf_files import write_gguf

CONVERTED = "to bfloat16 weights in"


def chat(server: Server, model: str, question: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 32,
        "temperature": 0,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    assert answer["model"] == model
    content: str = answer["choices"][0]["message"]["content"]
    return content


@pytest.mark.long
def test_a_file_is_converted_at_its_first_start_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf")
    answers = []
    for name in ("first", "second"):
        with serve("--model", str(file), log=tmp_path / name, is_forked=False) as server:
            answers.append(chat(server, "tiny", "Who keeps a falcon?"))
    assert answers[0] == answers[1]
    assert f"{CONVERTED} {tmp_path}/cache/snapserve/gguf" in (tmp_path / "first").read_text()
    assert CONVERTED not in (tmp_path / "second").read_text()


@pytest.mark.long
def test_a_file_that_cannot_be_read_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"no model")
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--model", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert f"snapserve serve: loading failed: {file} is no GGUF file" in ended.stderr


@pytest.mark.long
def test_smollm2_chats(smollm2_server: Server) -> None:
    assert "H2O" in chat(smollm2_server, "SmolLM2-135M-Instruct", "What is the chemical symbol for water?")
