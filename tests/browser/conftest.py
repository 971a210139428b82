"""Debian's Chromium, driven by Playwright, and a page of a server whose answers a test writes."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, sync_playwright

from server.options.models import DEMO_MODEL
from server.text.renderer import Renderer


@pytest.fixture(scope="session")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    renderer.load(str(DEMO_MODEL))
    yield renderer
    renderer.close()


# Not for the session: Playwright leaves an event loop running, beside which no asynchronous test can run.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport=ViewportSize(width=1200, height=800)) as context:
        context.set_default_timeout(20_000)
        yield context


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page that fails its test for each error on its console, and each request to another host."""
    page, faults = context.new_page(), list[str]()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.on(
        "request",
        lambda request: (
            faults.append(request.url) if not request.url.startswith("http://127.0.0.1:") else None
        ),
    )
    yield page
    # A browser reports every answer with an error status on its console.
    assert [fault for fault in faults if "the server responded with a status of 401" not in fault] == []
