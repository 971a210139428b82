"""Pictures of the page, for the docs: a real server with SmolLM2, looked at by Debian's Chromium.

Usage: `python -m bench.screenshots --out docs/images`. It writes `page-chat.png`, `page-kept.png`,
`page-live.png` and `page-narrow.png`. It needs the extra `dev` and the Debian package `chromium`.
"""

import argparse
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from bench.systems.servers import Server, serving
from bench.systems.system import ROOT, MeasurementError

NUM_SLOTS = 8
OPTIONS = ("--num-slots", str(NUM_SLOTS), "--slot-capacity", "540", "--no-compile", "--log-level", "warning")
TIMEOUT = 180_000.0  # milliseconds for the model to read or write something
SECRET = "The secret code is 482913."


def take(url: str, browser: Browser, out: Path) -> None:
    """Take all pictures of the server at `url`."""
    with shown(browser, 1200, 900, "light") as page:
        page.goto(url)
        ask_about_licence(page)
        save(page, out / "page-chat.png")
    with shown(browser, 1200, 900, "light") as page:
        page.goto(url)
        page.get_by_label("Show what the slot kept").check()
        ask_about_licence(page)
        page.locator(".kept-tokens summary").click()
        page.locator(".kept-tokens span", has_text="secret").first.scroll_into_view_if_needed()
        save(page, out / "page-kept.png")
    with load(url), shown(browser, 1200, 780, "dark") as page:
        page.goto(f"{url}/#live")
        # Until a ring has been overwritten, and the curves have something to show.
        expect(page.locator(".slot .note", has_text="wrapped").first).to_be_visible()
        page.wait_for_timeout(40_000)
        save(page, out / "page-live.png")
    with shown(browser, 390, 800, "dark") as page:
        page.goto(url)
        ask(page, "What is the capital of France?")
        save(page, out / "page-narrow.png")


def ask_about_licence(page: Page) -> None:
    lines = (ROOT / "LICENSE").read_text().splitlines()
    text = "\n".join([*lines[:100], "", SECRET, "", *lines[100:]])
    page.locator("#attach").set_input_files(
        {"name": "licence.txt", "mimeType": "text/plain", "buffer": text.encode()}
    )
    ask(page, "What is the secret code?")


def ask(page: Page, question: str) -> None:
    page.get_by_label("Temperature").evaluate("field => { field.value = 0; }")
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".message.assistant > .stats").last).to_contain_text("kept")


@contextmanager
def load(url: str) -> Iterator[None]:
    """Keep the slots busy with prompts and answers of different lengths."""
    text = (ROOT / "LICENSE").read_text()
    is_over = threading.Event()

    def client(number: int) -> None:
        body = {"max_tokens": 150 + 90 * number, "ignore_eos": True, "temperature": 0.8, "seed": number}
        with httpx.Client(base_url=url, timeout=None) as http:
            while not is_over.is_set():
                prompt = text[: 200 + 700 * number]
                with http.stream(
                    "POST", "/v1/completions", json={**body, "prompt": prompt, "stream": True}
                ) as answer:
                    for _ in answer.iter_lines():
                        if is_over.is_set():
                            break

    threads = [threading.Thread(target=client, args=(number,)) for number in range(NUM_SLOTS + 2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@contextmanager
def shown(browser: Browser, width: int, height: int, scheme: str) -> Iterator[Page]:
    size = ViewportSize(width=width, height=height)
    with browser.new_context(viewport=size, color_scheme="dark" if scheme == "dark" else "light") as context:
        context.set_default_timeout(TIMEOUT)
        expect.set_options(timeout=TIMEOUT)
        yield context.new_page()


def save(page: Page, path: Path) -> None:
    """Save with a palette: a third of the bytes of full colour."""
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(128).save(path, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    out: Path = parser.parse_args().out
    chromium = shutil.which("chromium")
    if chromium is None:
        print("bench.screenshots: apt-get install chromium", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    command = (sys.executable, "-m", "server", "serve", "--port", "{port}", *OPTIONS)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(Server("snapserve", command, "/ready"), Path(folder) / "log") as (url, _),
            sync_playwright() as playwright,
        ):
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            take(url, browser, out)
            browser.close()
    except MeasurementError as error:
        print(f"bench.screenshots: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
