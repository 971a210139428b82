"""`snapserve chat` with a server, its lines as from a pipe."""

import io

import pytest

from commands.cli import main
from server.text.renderer import Renderer
from tests.server.scripted import scripted_by
from tests.server.serving import RunningServer, serve, settings


def chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, text: str, *options: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    status = main(["chat", "--base-url", url, *options])
    return status, *capsys.readouterr()


def test_answers_and_the_conversation_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], renderer: Renderer
) -> None:
    # The answer says how many user messages the prompt has.
    backend = scripted_by(renderer, lambda prompt: f"{prompt.count('word')} <b>")
    with serve(renderer, make_backend=backend) as server:
        text = "word\n\nword again\n/new\nword anew\n/quit\nword unread\n"
        status, output, errors = chat(monkeypatch, capsys, server.url, text, "--system", "Be brief.")
    assert (status, errors) == (0, "")
    assert output == "1 <b>\n2 <b>\n1 <b>\n"


def test_a_refused_question_leaves_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], running: RunningServer
) -> None:
    status, output, errors = chat(monkeypatch, capsys, running.url, "Hello\n", "--pool", "none")
    assert (status, output.strip()) == (0, "")
    assert "snapserve chat: 'pool' must be one of" in errors


def test_a_server_that_refuses_or_is_absent_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], renderer: Renderer
) -> None:
    with serve(renderer, settings(api_keys=("key",))) as server:
        status, _, errors = chat(monkeypatch, capsys, server.url, "Hello\n")
        assert (status, "key" in errors) == (1, True)
        assert chat(monkeypatch, capsys, server.url, "", "--api-key", "key")[0] == 0
    status, _, errors = chat(monkeypatch, capsys, server.url, "Hello\n")
    assert (status, "cannot be reached" in errors) == (1, True)
