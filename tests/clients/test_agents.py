"""Agents of other projects, unchanged, through whole turns: tools, streams and typed answers."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import NODE_MODULES, PYTHON, TIME_LIMIT, run
from tests.clients.scripted import MODEL, scripted
from tests.e2e.process import Server, free_port
from tests.server.serving import RunningServer

pytestmark = [pytest.mark.clients, pytest.mark.long]
SCRIPTS = Path(__file__).parent / "scripts"
REPORT = '{"city": "Oslo", "degrees": 7}'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def weather(prompt: str) -> str:
    """Ask for the weather, then report it: by the tool for that, as JSON, or in words."""
    if "It is 7 degrees" not in prompt:
        return call("get_weather", '{"city": "Oslo"}')
    if '"name": "final_result"' in prompt:  # pydantic-ai's
        return call("final_result", REPORT)
    if '"name": "Report"' in prompt:  # LangChain's and LlamaIndex's
        return call("Report", REPORT)
    return REPORT if "in JSON form" in prompt else "Oslo has 7 degrees."


@pytest.fixture(scope="module")
def agent_server() -> Iterator[RunningServer]:
    with scripted(weather) as server:
        yield server


@pytest.mark.parametrize(
    "name",
    ["openai_agents", "pydantic_ai_client", "langchain_agent", "llama_index_client", "litellm_agent"],
)
def test_an_agent_of_a_python_package(agent_server: RunningServer, name: str) -> None:
    run(PYTHON, SCRIPTS / f"{name}.py", agent_server.url)


def test_litellm_proxy(client_server: Server, agent_server: RunningServer) -> None:
    """One proxy, which takes long to start, before the embedded model and before a scripted one."""
    servers = (client_server.url, "snapserve-demo", agent_server.url, MODEL)
    run(PYTHON, SCRIPTS / "litellm_proxy.py", str(free_port()), *servers)


def test_llm(agent_server: RunningServer, tmp_path: Path) -> None:
    """`llm`: a model of a user's own file, a tool, and a schema."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: local\n  model_name: {MODEL}\n  api_base: {agent_server.url}/v1\n"
        "  supports_tools: true\n  supports_schema: true\n"
    )
    own = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    tool = 'def get_weather(city: str) -> str:\n    """Weather."""\n    return f"It is 7 degrees in {city}."'
    llm = PYTHON.with_name("llm")
    tools = ("--functions", tool, "How is Oslo?")
    run(llm, "prompt", "-m", "local", *tools, last="Oslo has 7 degrees.", environment=own)
    question = "It is 7 degrees in Oslo. Say it in JSON form."
    schema = ("--schema", "city, degrees int", "--no-stream", question)
    run(llm, "prompt", "-m", "local", *schema, last=REPORT, environment=own)


def test_opencode(tmp_path: Path) -> None:
    """opencode runs a command and answers."""

    def script(prompt: str) -> str:
        if '"name": "bash"' not in prompt:  # it asks for a title too
            return "Six times seven"
        if "\n42" in prompt or ">42" in prompt:
            return "The command printed 42."
        return call("bash", '{"command": "echo $((6 * 7)) | tee made", "description": "Multiplies"}')

    folder = tmp_path / "work"
    folder.mkdir()
    with scripted(script) as server:
        config = {
            "$schema": "https://opencode.ai/config.json",
            "autoupdate": False,
            "share": "disabled",
            "model": f"local/{MODEL}",
            "small_model": f"local/{MODEL}",
            "enabled_providers": ["local"],
            "provider": {
                "local": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": f"{server.url}/v1"},
                    "models": {MODEL: {"name": MODEL, "tool_call": True}},
                }
            },
        }
        (folder / "opencode.json").write_text(json.dumps(config))
        homes = {
            name: str(tmp_path / name)
            for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
        }
        done = subprocess.run(
            [NODE_MODULES / ".bin" / "opencode", "run", "What is six times seven?"],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            cwd=folder,
            env=os.environ | homes | {"PWD": str(folder), "OPENCODE_DISABLE_MODELS_FETCH": "1"},
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "The command printed 42." in done.stdout, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert (folder / "made").read_text() == "42\n"
