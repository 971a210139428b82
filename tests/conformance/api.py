"""A server as this suite sees it: a base URL, a key, a model's name.

Nothing here knows whose server it is.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

NO_ROUTE = (404, 405, 501)
HELLO: list[Any] = [{"role": "user", "content": "Say hello to the world."}]


@dataclass(frozen=True)
class Api:
    """Sends requests and returns answers. Ends the test as unsupported if the server says so."""

    http: httpx.Client
    model: str

    def raw(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Return the answer, with any status."""
        return self.http.post(path, json=dict(body))

    def post(self, path: str, **body: Any) -> Any:
        """Return the body of a success."""
        response = self.raw(path, {"model": self.model} | body)
        return self.success(response)

    def get(self, path: str, **params: str) -> Any:
        return self.success(self.http.get(path, params=params))

    def success(self, response: httpx.Response) -> Any:
        """Return the body of a success; a refusal that says so ends the test as unsupported."""
        if response.status_code in NO_ROUTE or (
            response.status_code in (400, 422) and says_unsupported(response.text)
        ):
            pytest.skip(f"unsupported: {response.status_code} {response.text[:200]}")
        assert response.status_code == 200, f"{response.status_code} {response.text[:1000]}"
        return response.json()

    def chat(self, **body: Any) -> Any:
        """Return a short answer to a greeting, unless `body` says otherwise."""
        return self.post(
            "/v1/chat/completions", **({"messages": HELLO, "max_tokens": 8, "temperature": 0} | body)
        )

    def complete(self, **body: Any) -> Any:
        return self.post(
            "/v1/completions", **({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0} | body)
        )

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Return the data of a stream's events, which must end with the mark of its end."""
        with self.streaming(path, **body) as response:
            lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines), lines
        assert lines[-1] == "data: [DONE]", lines[-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def stream_chat(self, **body: Any) -> list[Any]:
        return self.stream(
            "/v1/chat/completions", **({"messages": HELLO, "max_tokens": 8, "temperature": 0} | body)
        )

    @contextmanager
    def streaming(self, path: str, **body: Any) -> Iterator[httpx.Response]:
        with self.http.stream("POST", path, json={"model": self.model, "stream": True} | body) as response:
            if response.status_code != 200:
                response.read()
                self.success(response)
            assert response.headers["content-type"].startswith("text/event-stream")
            yield response

    def refuses(self, path: str, status: int | tuple[int, ...] = 400, **body: Any) -> Any:
        """Return the error of a request that must be refused, in OpenAI's form."""
        response = self.raw(path, {"model": self.model} | body)
        allowed = (status,) if isinstance(status, int) else status
        assert response.status_code in allowed, f"{response.status_code} {response.text[:1000]}"
        return error_of(response)


def says_unsupported(text: str) -> bool:
    return any(
        word in text.lower()
        for word in (
            "unsupported",
            "not supported",
            "not implemented",
            "does not support",
            "unknown parameter",
        )
    )


def error_of(response: httpx.Response) -> Any:
    """Return an error's details: an object with a message, a type, and `param` and `code` or null."""
    error = response.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert {"param", "code"} <= set(error), error
    assert error["code"] is None or isinstance(error["code"], str), "codes are strings"
    return error


def text_of(chunks: list[Any], index: int = 0) -> str:
    """Return the text of a streamed choice, of chat or of completions."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(
        (choice["delta"].get("content") if "delta" in choice else choice["text"]) or "" for choice in choices
    )
