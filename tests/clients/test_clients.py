"""Clients of other projects, unchanged, against a real server of the embedded model."""

from pathlib import Path

import pytest

from tests.clients.conftest import NODE_MODULES, PYTHON, run
from tests.clients.questions import write_tasks
from tests.e2e.process import Server, serve
from tests.paths import DEMO_MODEL

pytestmark = [pytest.mark.clients, pytest.mark.long]
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("name", ["langchain_openai_client", "litellm_sdk", "instructor_client"])
def test_python_client(client_server: Server, name: str) -> None:
    run(PYTHON, SCRIPTS / f"{name}.py", client_server.url)


def test_lm_evaluation_harness(client_server: Server, tmp_path: Path) -> None:
    write_tasks(tmp_path, DEMO_MODEL)
    run(
        PYTHON,
        SCRIPTS / "lm_eval_client.py",
        client_server.url,
        tmp_path,
        environment={"HF_HOME": str(tmp_path / "home")},
    )


def test_openai_npm_package(client_server: Server) -> None:
    """Node looks for modules beside the script, so the script runs from the folder of the modules."""
    script = NODE_MODULES.parent / "openai_node.mjs"
    script.write_text((SCRIPTS / "openai_node.mjs").read_text())
    run("node", script, client_server.url)


def test_schemathesis_finds_no_server_error_and_no_undeclared_answer(tmp_path: Path) -> None:
    """Requests of every kind that our own schema allows, and of many that it forbids.

    Contexts are short, since requests of Anthropic's and Ollama's APIs are answered up to their end.
    """
    options = (
        "--checks",
        "not_a_server_error,response_schema_conformance",
        "--phases",
        "coverage,fuzzing",
        "--max-examples",
        "4",
        "--seed",
        "1",
    )
    contexts = ("--policy", "full", "--max-model-len", "128", "--batch-dir", str(tmp_path / "batches"))
    with serve("--dtype", "float32", *contexts, log=tmp_path / "log") as server:
        run(PYTHON.with_name("schemathesis"), "run", f"{server.url}/openapi.json", *options, last="")
