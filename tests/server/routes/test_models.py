"""`/v1/models` and `/v1/models/{id}`, and the names that a request may give."""

from typing import Any

import httpx
import pytest
from openai.types import Model

from server.text.renderer import Renderer
from tests.server.serving import serve, settings


def generate(http: httpx.Client, **model: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1} | model)


def test_a_model_has_every_field(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert Model.model_validate(model, strict=True).owned_by == "snapserve"
    assert model["max_model_len"] == 1024
    assert model["created"] == 1_700_000_000
    assert http.get("/v1/models/demo").json() == model


def test_names_with_slashes_aliases_and_no_name(renderer: Renderer) -> None:
    with (
        serve(renderer, settings(model_names=("org/model", "gpt-4o", "a b"))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [
            "org/model",
            "gpt-4o",
            "a b",
        ]
        assert http.get("/v1/models/org/model").json()["id"] == "org/model"
        assert http.get("/v1/models/org%2Fmodel").json()["id"] == "org/model"
        assert http.get("/v1/models/a%20b").json()["root"] == "org/model"
        for name in ("org/model", "gpt-4o"):
            assert generate(http, model=name).json()["model"] == "org/model"
        assert generate(http).json()["model"] == "org/model"
        assert generate(http, model="org").status_code == 404
        assert http.get("/v1/models/org").status_code == 404
        assert http.post("/tokenize", json={"model": "org", "prompt": "x"}).status_code == 404


@pytest.mark.parametrize("name", ["anything", "demo"])
def test_a_wildcard_takes_any_name(renderer: Renderer, name: str) -> None:
    with (
        serve(renderer, settings(model_names=("demo", "*"))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["demo"]
        assert generate(http, model=name).json()["model"] == "demo"
        assert http.get(f"/v1/models/{name}").json()["id"] == "demo"
