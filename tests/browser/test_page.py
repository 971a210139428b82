"""The page in a real Chromium: chat and live view as a person uses them."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, ViewportSize, expect

from backends.fake import slot_pool
from cache.policy import full, snapstream
from cache.scorer import WindowScorer
from server.text.renderer import Renderer
from tests.server.scripted import scripted_by
from tests.server.serving import RunningServer, serve, settings, spec

pytestmark = pytest.mark.long

ANSWER = """# Heading

- one
- **two** and `three`

```python
print("<b>")
```

| a | b |
|---|---|
| 1 | 2 |

<script>document.title = "stolen"</script><img src="x" onerror="document.title = 'stolen'">
[bad](javascript:document.title='stolen') [good](https://example.com/a)
![picture](https://example.com/pixel.png)"""
POOLS = (
    slot_pool(2, full(1024), 1024),
    slot_pool(2, snapstream(4, 32, 28, WindowScorer(observation_window=4)), 1024, "small"),
)


@contextmanager
def scripted(
    renderer: Renderer, answer: str = ANSWER, *, is_open: bool = True, **changes: Any
) -> Iterator[RunningServer]:
    backend = scripted_by(renderer, lambda _: answer)
    own = settings(**changes)
    with serve(renderer, own, spec(pools=POOLS), is_open=is_open, make_backend=backend) as server:
        yield server


def body_of(request: Request) -> dict[str, Any]:
    body = request.post_data_json
    assert isinstance(body, dict)
    return body


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def test_an_answer_is_shown_as_markdown_and_runs_nothing(renderer: Renderer, page: Page) -> None:
    with scripted(renderer) as server:
        page.goto(server.url)
        ask(page, "Hello")
        answer = page.locator(".message.assistant")
        expect(answer.locator(".stats")).to_contain_text("kept")
        expect(answer.locator("li")).to_have_count(2)
        expect(answer.locator("strong")).to_have_text("two")
        expect(answer.locator("pre code")).to_have_text('print("<b>")')
        expect(answer.locator("td")).to_have_count(2)
        # Text of the answer, not elements of the page.
        expect(answer).to_contain_text('<script>document.title = "stolen"</script>')
        assert answer.locator("script, img").count() == 0
        links = [link.get_attribute("href") for link in answer.locator("a").all()]
        assert links == ["https://example.com/a", "https://example.com/pixel.png"]
        assert page.title() == "snapserve"
        stats = answer.locator(".stats").inner_text()
        assert re.search(
            r"first token after [\d.]+ s · \d+ tokens in, \d+ out .*slot of full: \d+ kept", stats
        )


def test_settings_files_and_code_are_those_of_the_request(renderer: Renderer, page: Page) -> None:
    with scripted(renderer, "Yes.") as server:
        page.goto(server.url)
        page.get_by_label("System prompt").fill("It's a test")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Pool of slots").select_option("small")
        page.locator("#attach").set_input_files(
            {"name": "note.txt", "mimeType": "text/plain", "buffer": "größe <b>".encode()}
        )
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Which?")
        body = body_of(sent.value)
        assert body["messages"] == [
            {"role": "system", "content": "It's a test"},
            {"role": "user", "content": "note.txt:\ngröße <b>\n\nWhich?"},
        ]
        assert (body["temperature"], body["pool"], body["model"]) == (0.5, "small", "demo")
        expect(page.locator(".message.assistant")).to_contain_text("slot of small")
        page.get_by_text("Last request as code").click()
        expect(page.locator("#curl")).to_contain_text("It'\\''s a test")
        code = page.locator("#python").inner_text()
        compile(code, "python", "exec")
        assert 'extra_body={"pool": "small"}' in code
        # The next request has the whole conversation; a new chat has nothing of it.
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "And?")
        roles = [message["role"] for message in body_of(sent.value)["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_prompt_is_shaded_by_what_its_slot_kept(
    renderer: Renderer, browser: Browser, scheme: Any
) -> None:
    shown = browser.new_context(color_scheme=scheme)
    with scripted(renderer, "Yes.") as server, shown:
        page = shown.new_page()
        page.goto(server.url)
        page.get_by_label("Pool of slots").select_option("small")
        page.get_by_label("Show what the slot kept").check()
        words = " ".join(f"word{number} <b>" for number in range(40))
        ask(page, f"{words} Why?")
        kept = page.locator(".kept-tokens")
        kept.locator("summary").click()
        expect(kept.locator(".prompt")).to_contain_text(words)
        evicted, held = kept.locator(".evicted").first, kept.locator("span:not(.evicted)").first
        expect(evicted).to_have_attribute("title", "held by 0 % of layers and heads")
        expect(held).to_have_attribute("title", "held by 100 % of layers and heads")
        colours = [
            each.evaluate("node => getComputedStyle(node).backgroundColor") for each in (evicted, held)
        ]
        assert colours[0] != colours[1]
        for ratio in page.evaluate(CONTRASTS):
            assert ratio >= 4.5, (scheme, ratio)
        page.get_by_text("Last request as code").click()
        expect(page.locator("#python")).to_contain_text(
            'extra_body={"pool": "small", "return_kept_tokens": True}'
        )


@pytest.mark.parametrize("way", ["button", "key"])
def test_an_answer_streams_and_can_be_stopped(renderer: Renderer, page: Page, way: str) -> None:
    with scripted(renderer, "word " * 300, is_open=False) as server:
        page.goto(server.url)
        ask(page, "Hello")
        answer = page.locator(".message.assistant")
        server.gate.let(8)
        expect(answer).to_contain_text("word word")
        shown = answer.inner_text().count("word")
        server.gate.let(8)
        expect(answer).to_contain_text("word " * (shown + 2))
        if way == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        expect(answer).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        for _ in range(200):  # slowly: the server must learn that the client has left before the answer's end
            if server.observed.finals:
                break
            server.gate.let(1)
            time.sleep(0.02)
        assert [final.reason.value for final in server.observed.finals] == ["abort"]
        server.gate.open()


def test_a_late_frame_does_not_hide_that_an_answer_was_stopped(renderer: Renderer, page: Page) -> None:
    with scripted(renderer, "word " * 300, is_open=False) as server:
        page.goto(server.url)
        page.evaluate(
            "requestAnimationFrame = (draw) => setTimeout(draw, 400); cancelAnimationFrame = clearTimeout"
        )
        ask(page, "Hello")
        answer = page.locator(".message.assistant")
        server.gate.let(8)
        expect(answer).to_contain_text("word word")
        server.gate.let(8)
        page.wait_for_timeout(150)  # new words wait for their frame
        page.keyboard.press("Escape")
        expect(answer).to_contain_text("stopped")
        page.wait_for_timeout(500)
        expect(answer).to_contain_text("stopped")
        server.gate.open()


def test_an_error_is_shown_and_the_question_is_not_sent_again(renderer: Renderer, page: Page) -> None:
    with scripted(renderer, "Yes.") as server:
        broken = 'data: {"error": {"message": "the step failed <b>"}}\n\n'
        page.goto(server.url)
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=broken))
        ask(page, "first")
        expect(page.locator(".message.error")).to_have_text("the step failed <b>")
        page.unroute("**/v1/chat/completions")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "second")
        assert [message["content"] for message in body_of(sent.value)["messages"]] == ["second"]


def test_the_page_asks_for_a_key_and_forgets_it(renderer: Renderer, page: Page) -> None:
    with scripted(renderer, "Yes.", api_keys=("secret-key",)) as server:
        page.goto(server.url)
        expect(page.get_by_role("dialog")).to_contain_text("needs a key")
        page.get_by_role("dialog").get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_contain_text("does not know this key")
        page.get_by_role("dialog").get_by_label("API key").fill("secret-key")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_hidden()
        # Both requests that waited for the key were sent again.
        expect(page.locator("#model")).to_have_value("demo")
        expect(page.locator("#pool option")).to_have_count(3)
        ask(page, "Hello")
        expect(page.locator(".message.assistant")).to_contain_text("Yes.")
        assert "secret-key" not in page.content()
        stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert stored == '[{},{},""]'
        page.reload()
        expect(page.get_by_role("dialog")).to_contain_text("needs a key")


def test_slots_fill_wrap_and_become_free(renderer: Renderer, page: Page) -> None:
    with scripted(renderer, "word " * 120, is_open=False) as server:
        page.goto(server.url)
        page.get_by_label("Pool of slots").select_option("small")
        ask(page, "Hello")
        page.get_by_role("tab", name="Live").click()
        expect(page.locator(".slot")).to_have_count(4)
        slot = page.locator(".slot").nth(2)
        server.gate.let(4)
        expect(slot.locator(".note")).to_contain_text("held")
        early = pixels(page, 2)
        server.gate.let(40)
        expect(slot.locator(".note")).to_contain_text("wrapped")
        late = pixels(page, 2)
        assert len({early, late, pixels(page, 3)}) == 3
        expect(page.get_by_role("img", name=re.compile(r"Slot 0: \d+ in, \d+ out")).first).to_be_visible()
        expect(page.locator("#live-state")).to_contain_text("small: 1 of 2 slots, 0 waiting")
        server.gate.open()
        expect(slot.locator(".note")).to_have_text("free")
        expect(page.get_by_role("img", name=re.compile("Tokens per second.*most [1-9]"))).to_be_visible()


def pixels(page: Page, index: int) -> str:
    drawn: str = page.evaluate("i => document.querySelectorAll('.slot canvas')[i].toDataURL()", index)
    return drawn


def test_all_of_it_works_by_keyboard(renderer: Renderer, page: Page) -> None:
    with scripted(renderer, "Yes.") as server:
        page.goto(server.url)
        expect(page.get_by_label("Message")).to_be_focused()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        expect(page.locator(".message.user")).to_have_text("one\ntwo")
        expect(page.locator(".message.assistant")).to_contain_text("Yes.")
        for _ in range(40):
            page.keyboard.press("Shift+Tab")
            if page.evaluate("document.activeElement.id") == "tab-chat":
                break
        page.keyboard.press("ArrowRight")
        expect(page.locator(".slot")).to_have_count(4)
        expect(page.get_by_role("tab", name="Live")).to_be_focused()
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_label("Message")).to_be_visible()


def test_the_reference_is_rendered_from_this_server_alone(renderer: Renderer, page: Page) -> None:
    with scripted(renderer, api_keys=("secret-key",)) as server:
        page.goto(f"{server.url}/docs")
        page.get_by_role("textbox", name="API key").fill("secret-key")
        page.keyboard.press("Enter")
        row = page.locator(".opblock", has_text="/v1/models").first
        expect(page.locator(".opblock", has_text="/v1/chat/completions").first).to_be_visible()
        row.locator("button").first.click()
        row.get_by_role("button", name="Try it out").click()
        row.get_by_role("button", name="Execute").click()
        expect(row.get_by_text("Authorization: Bearer secret-key")).to_be_visible()
        expect(row).to_contain_text('"owned_by": "snapserve"')


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_telephone_in_light_and_dark(renderer: Renderer, browser: Browser, scheme: Any) -> None:
    narrow = browser.new_context(viewport=ViewportSize(width=390, height=800), color_scheme=scheme)
    with scripted(renderer) as server, narrow:
        page = narrow.new_page()
        page.goto(server.url)
        ask(page, "Hello")
        expect(page.locator(".message.assistant .stats")).to_contain_text("kept")
        assert page.get_by_role("button", name="Send").is_visible()
        for view in ("Chat", "Live"):
            page.get_by_role("tab", name=view).click()
            assert page.evaluate("document.documentElement.scrollWidth") == 390, view
            for ratio in page.evaluate(CONTRASTS):
                assert ratio >= 4.5, (view, scheme, ratio)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")


# The contrast of each text with what lies behind it, by WCAG 2.
CONTRASTS = """() => {
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = (rgb) => rgb.map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  // A mixed colour is written with parts from 0 to 1.
  const numbers = (text) => text.match(/[\\d.]+/g)
    .map((part, i) => Number(part) * (text.startsWith("color(") && i < 3 ? 255 : 1));
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const back = numbers(getComputedStyle(node).backgroundColor);
      if (back.length === 3 || back[3] > 0) return back.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const shown = [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility()
    && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()));
  return shown.map((node) => {
    const [a, b] = [numbers(getComputedStyle(node).color).slice(0, 3), behind(node)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
}"""
