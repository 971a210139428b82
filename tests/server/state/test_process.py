"""Real server processes with one Redis."""

import signal
import time
from pathlib import Path

import openai
import pytest

from tests.e2e.process import serve
from tests.server.state.conftest import RedisServer


@pytest.mark.long
@pytest.mark.redis
def test_two_processes_share_limits_and_responses(tmp_path: Path, redis_server: RedisServer) -> None:
    options = ("--backend", "fake", "--state-url", redis_server.url, "--rate-limit-requests", "3")
    with (
        serve(*options, "--replica", "a", log=tmp_path / "a") as here,
        serve(*options, "--replica", "b", log=tmp_path / "b") as there,
        openai.OpenAI(base_url=f"{here.url}/v1", api_key="any", max_retries=0) as first,
        openai.OpenAI(base_url=f"{there.url}/v1", api_key="any", max_retries=0) as second,
    ):
        made = first.responses.create(model="snapserve-demo", input="Hello", user="me", max_output_tokens=8)
        then = second.responses.create(
            model="snapserve-demo", input="And?", previous_response_id=made.id, max_output_tokens=8
        )
        assert first.responses.retrieve(then.id).output_text == then.output_text
        first.responses.create(model="snapserve-demo", input="Hello", max_output_tokens=8)
        with pytest.raises(openai.RateLimitError):
            second.responses.create(model="snapserve-demo", input="Hello", max_output_tokens=8)
        time.sleep(2)  # both exchange what they served
        for server, name in ((here, "a"), (there, "b")):
            metrics = server.metrics()
            assert metrics["snapserve:shared_state_errors_total"] == 0
            assert metrics[f"snapserve:shared_state_errors_total{{{name}}}"] == 0
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=60) == 0
    logs = [(tmp_path / name).read_text() for name in ("a", "b")]
    assert not any("Traceback" in log or "never retrieved" in log for log in logs), logs
