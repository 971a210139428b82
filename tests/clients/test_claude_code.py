"""Claude Code, unchanged: it sends its real requests, and runs the command that the model calls for."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.options.models import DEMO_MODEL
from server.options.settings import ToolParserName
from server.text.renderer import Renderer
from tests.clients.conftest import NODE_MODULES, TIME_LIMIT
from tests.server.scripted import scripted_by
from tests.server.serving import MODEL, serve, settings, spec

pytestmark = [pytest.mark.clients, pytest.mark.long]


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    renderer.load(str(DEMO_MODEL))
    yield renderer
    renderer.close()


@pytest.fixture
def program() -> Path:
    [program] = NODE_MODULES.glob("@anthropic-ai/claude-code-*/claude")
    return program


def claude(program: Path, url: str, home: Path, *arguments: str) -> Any:
    """Run Claude Code with one prompt, and return what it reports."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "one",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    done = subprocess.run(
        [str(program), "--print", "--output-format", "json", *arguments],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def called(name: str, **arguments: Any) -> str:
    return f"I do it.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_it_runs_a_command_and_loads_a_tool(tmp_path: Path, program: Path, renderer: Renderer) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        if "The tool WebFetch can be called now." in prompt:
            return "It printed 42."
        if "answer-42" in prompt:
            return called("ToolSearch", query="select:WebFetch", max_results=1)
        return called("Bash", command="echo answer-$((40 + 2))", description="Print the answer")

    own = settings(tool_call_parser=ToolParserName.HERMES, api_keys=("one",))
    # Its tools and instructions are 26,000 of the demo model's tokens, and it asks for an answer of 32,000.
    room = spec(max_model_len=50_000)
    with serve(renderer, own, room, make_backend=scripted_by(renderer, reply)) as server:
        report = claude(program, server.url, tmp_path, "Run it.", "--allowedTools", "Bash(echo:*)")
        assert set(server.observed.statuses) == {200}
    assert (report["is_error"], report["result"], report["num_turns"]) == (False, "It printed 42.", 3)
    assert [name in prompts[-1] for name in ("Run it.", "answer-42", "DeferredToolPlaceholder")] == [
        True,
        True,
        False,
    ]
    assert "x-anthropic-billing-header" not in prompts[0]
    assert report["usage"]["output_tokens"] > 0


def test_it_says_that_a_prompt_is_too_long(tmp_path: Path, program: Path, renderer: Renderer) -> None:
    with serve(renderer, backend_spec=spec(max_model_len=1024)) as server:
        report = claude(program, server.url, tmp_path, "Run it.")
    assert report["is_error"]
    assert "prompt is too long" in report["result"].lower(), report
