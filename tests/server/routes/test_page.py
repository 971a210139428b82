"""The page's files: what they are, and what a browser may do with them."""

import re

import httpx
import pytest

from server.routes import page
from server.text.renderer import Renderer
from tests.paths import ROOT
from tests.server.serving import serve, settings

FOLDER = ROOT / "server" / "routes" / "page_files"


def name_of(path: str) -> str:
    return {"/": "index.html", "/docs": "docs.html"}.get(path, path.rpartition("/")[2])


OWN_PATHS = [path for path in sorted(page.PATHS) if "swagger" not in path]


@pytest.mark.parametrize("path", OWN_PATHS)
def test_each_file_is_served_as_it_is(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    name = name_of(path)
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = http.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_every_file_of_the_folder_has_a_path() -> None:
    assert set(map(name_of, OWN_PATHS)) == {file.name for file in FOLDER.iterdir()}


def test_a_browser_may_load_and_call_this_server_only(http: httpx.Client) -> None:
    policy = http.get("/").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("default-src") == "'none'"
    assert rules.pop("img-src") == "'self' data:"
    assert set(rules.values()) == {"'self'", "'none'"}
    assert rules["script-src"] == rules["connect-src"] == "'self'"


def test_the_files_name_no_other_host_and_make_no_html_of_text() -> None:
    for file in FOLDER.iterdir():
        text = file.read_text()
        addresses = set(re.findall(r"https?://[\w.]+", text))
        assert addresses <= {"http://www.w3.org"}, file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file
    # The policy refuses scripts and styles inside the page.
    for name in ("index.html", "docs.html"):
        inside = re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", (FOLDER / name).read_text())
        assert not inside, name


def test_the_page_needs_no_key(renderer: Renderer) -> None:
    with serve(renderer, settings(api_keys=("key",))) as server, httpx.Client(base_url=server.url) as http:
        assert {http.get(path).status_code for path in page.PATHS} == {200}
        assert http.get("/v1/models").status_code == http.get("/page/other.js").status_code == 401


def test_the_page_can_be_left_out(renderer: Renderer) -> None:
    with serve(renderer, settings(page=False)) as server, httpx.Client(base_url=server.url) as http:
        assert {http.get(path).status_code for path in page.PATHS} == {404}
