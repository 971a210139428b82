"""Codex CLI, unchanged, through whole turns with tools of its own."""

from pathlib import Path

import pytest

from tests.clients.conftest import NODE_MODULES, run
from tests.clients.scripted import MODEL, scripted

pytestmark = [pytest.mark.clients, pytest.mark.long]
CONFIG = """model = "{model}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""
COMMAND = '{"name": "exec_command", "arguments": {"cmd": "echo $((6 * 7)) > made; cat made"}}'
CALL = f"<tool_call>\n{COMMAND}\n</tool_call>"


def test_codex_runs_a_command_and_answers(tmp_path: Path) -> None:
    prompts = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return "The command printed 42." if "42" in prompt.partition("What is six times")[2] else CALL

    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    with scripted(script) as server:
        (home / "config.toml").write_text(CONFIG.format(model=MODEL, url=server.url))
        run(
            NODE_MODULES / ".bin" / "codex",
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "--cd",
            folder,
            "What is six times seven?",
            last="The command printed 42.",
            environment={"CODEX_HOME": str(home)},
        )
        ignored = server.observed.render().decode()
    assert (folder / "made").read_text() == "42\n"
    assert len(prompts) == 2
    assert "exec_command" in prompts[0]
    assert "web_search" not in prompts[0].partition("What is six times")[0].partition("You may call")[2]
    assert "snapserve:ignored_parameters_total" in ignored
