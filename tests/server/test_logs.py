"""What the log says of requests, and what it must not say."""

import json
import logging
import socket
from collections.abc import Iterator

import httpx
import pytest

from server.http.auth import key_name
from server.logs import JsonFormatter, TextFormatter, fields
from server.options.settings import ConnectionLimits
from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve, settings

BODY = {"prompt": "Anna keeps", "max_tokens": 4, "ignore_eos": True}


class Lines(logging.Handler):
    """Lines as they would be written."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(JsonFormatter()), logging.getLogger("server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def post(server: RunningServer, **headers: str) -> httpx.Response:
    num_answered = len(server.observed.statuses)
    response = httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=30)
    server.observed.wait_until(lambda: len(server.observed.statuses) > num_answered)
    return response


def test_every_request_has_a_line_and_probes_have_none(renderer: Renderer, lines: Lines) -> None:
    with serve(renderer, settings(api_keys=("secret-key",))) as server:
        response = post(server, Authorization="Bearer secret-key")
        post(server, Authorization="Bearer other-secret")
        httpx.get(f"{server.url}/health")
    whole, refused = (json.loads(line) for line in lines.lines)
    usage = response.json()["usage"]
    assert (whole["logger"], whole["level"], whole["message"]) == ("server.access", "info", "request")
    assert (whole["method"], whole["path"], whole["status"]) == ("POST", "/v1/completions", 200)
    assert whole["request_id"] == response.headers["x-request-id"]
    assert whole["key"] == key_name("secret-key")
    assert (whole["prompt_tokens"], whole["output_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert 0 < whole["first_byte"] <= whole["duration"]
    assert refused["status"] == 401
    assert not {"key", "prompt_tokens", "output_tokens"} & refused.keys()
    assert not any(text in "".join(lines.lines) for text in ("secret", "Anna"))


def test_prompts_are_logged_on_request(renderer: Renderer, lines: Lines) -> None:
    with serve(renderer, settings(log_prompts=True)) as server:
        post(server, **{"x-request-id": "mine"})
    prompt, _ = (json.loads(line) for line in lines.lines)
    assert (prompt["message"], prompt["request_id"]) == ("prompt", "mine")
    assert "Anna keeps" in prompt["prompt"]


def test_an_incomplete_request_is_recorded_with_its_answer(renderer: Renderer, lines: Lines) -> None:
    with serve(renderer, settings(connections=ConnectionLimits(read_timeout=0.2))) as server:
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 9\r\n\r\n{"
            )
            assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
        server.observed.wait_until(lambda: server.observed.statuses == [408])
    assert [json.loads(line)["status"] for line in lines.lines] == [408]


@pytest.mark.parametrize("value", ["/a\nERROR forged", "/a b", '/"', "/\x1b[2J", "/é", "/a=b"])
@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_a_value_cannot_inject_lines_or_fields(formatter: logging.Formatter, value: str) -> None:
    record = logging.makeLogRecord(
        {"msg": "request", "name": "x", "levelname": "INFO", **fields(path=value, key=None)}
    )
    line = formatter.format(record)
    assert line.isprintable()
    quoted = (
        json.loads(line)["path"]
        if isinstance(formatter, JsonFormatter)
        else json.loads(line.partition("path=")[2])
    )
    assert quoted == value
    assert "key" not in line


def test_an_exception_is_one_line_of_json() -> None:
    try:
        raise ValueError("what went wrong")
    except ValueError as error:
        record = logging.makeLogRecord(
            {"msg": "failed", "exc_info": (ValueError, error, error.__traceback__)}
        )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "what went wrong" in json.loads(line)["exception"]
