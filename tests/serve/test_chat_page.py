# SPDX-License-Identifier: Apache-2.0
"""The page at /, in headless Chromium with real clicks and keys."""

import re
import shutil

import pytest
from test_tools import saying

from scripted_engine import ScriptedEngine
from serving_thread import server

ANSWER = """# Title
<img src=x onerror="document.title='broken in'"> **bold** `<b>` [a](https://example.org) [b](javascript:1)
- one
- two

```python
if a < b: pass
```
"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def engine(text, **options):
    return ScriptedEngine(
        vocab_size=300, context_length=4096, logits=saying(text, certainty=99), **options
    )


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser):
    pages = []

    def open_page(url, width, **options):
        context = browser.new_context(viewport={"width": width, "height": 700}, **options)
        pages.append(context)
        page = context.new_page()
        page.failures = []
        page.on("pageerror", lambda error: page.failures.append(str(error)))
        page.on(
            "console", lambda line: page.failures.append(line.text) if line.type == "error" else 0
        )
        page.goto(url)
        page.get_by_role("heading", name="scripted").wait_for()
        return page

    yield open_page
    for context in pages:
        context.close()


@pytest.mark.parametrize("width", [1280, 400])
def test_a_conversation_is_shown_and_sent(opened, width):
    # Slow enough for the page's clock to see time go by.
    with server(engine(ANSWER, delay=0.005), template=TEMPLATE) as running:
        page = opened(running.url, width)
        asked = []
        page.on("request", lambda r: asked.append(r.post_data_json) if r.method == "POST" else 0)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("System prompt").fill("be brief")
        page.get_by_role("button", name="Done").click()
        page.get_by_label("Message", exact=True).fill("first <b>")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Regenerate").wait_for()
        answer = page.locator("article.assistant .text")
        assert answer.locator("h3").inner_text() == "Title"
        assert answer.locator("strong").inner_text() == "bold"
        assert answer.locator("p code").inner_text() == "<b>"
        assert answer.locator("li").all_inner_texts() == ["one", "two"]
        assert answer.locator("pre").inner_text() == "if a < b: pass"
        assert answer.locator("a").count() == 1
        assert answer.locator("img").count() == 0
        assert "onerror" in answer.inner_text()
        assert page.title() == "scripted"
        assert "tokens/s" in page.locator("article.assistant .foot").inner_text()
        assert page.locator("article.user .text").inner_text() == "first <b>"
        assert asked[0]["temperature"] == 0
        assert [m["role"] for m in asked[0]["messages"]] == ["system", "user"]
        # Keys: the arrow edits the last question, Enter sends.
        page.get_by_label("Message", exact=True).press("ArrowUp")
        page.get_by_label("Edited message").fill("second")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").wait_for()
        assert page.locator("article.user .text").all_inner_texts() == ["second"]
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_role("button", name="Regenerate").wait_for()
        assert page.locator("article").count() == 2
        assert len(asked) == 3
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.reload()
        assert page.locator("article").count() == 2
        page.get_by_role("button", name="New chat").click()
        assert page.locator("article").count() == 0
        assert page.failures == []


def test_stop_ends_the_generation_and_copy_copies(opened):
    with server(engine("word " * 500, delay=0.02), template=TEMPLATE) as running:
        page = opened(running.url, 1280, permissions=["clipboard-read", "clipboard-write"])
        page.get_by_label("Message", exact=True).fill("go")
        page.keyboard.press("Enter")
        page.locator("article.assistant .text", has_text="word").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("alert").get_by_text("stopped").wait_for()
        assert running.is_idle()
        page.locator("article.assistant").get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith("word")
        assert copied.strip() == page.locator("article.assistant .text").inner_text().strip()


def test_api_keys_are_requested_and_errors_shown(browser):
    with server(engine("x"), template=TEMPLATE, api_key="secret") as running:
        context = browser.new_context()
        page, keys = context.new_page(), []
        page.on("request", lambda request: keys.append(request.headers.get("authorization")))
        page.goto(running.url)
        page.get_by_role("heading", name="the API key is missing").wait_for()
        assert set(keys) == {None}, "a key that nobody has given"
        page.get_by_label("Message", exact=True).fill("go")
        page.keyboard.press("Enter")
        page.get_by_role("alert").wait_for()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Done").click()
        page.get_by_role("heading", name="scripted").wait_for()
        page.get_by_label("Message", exact=True).fill("go")
        page.keyboard.press("Enter")
        page.get_by_text("x", exact=True).wait_for()
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        page.reload()
        page.get_by_role("heading", name="scripted").wait_for()
        assert set(keys) == {None, "Bearer secret"}
        context.close()


def test_chat_page_contacts_no_other_server():
    with server(engine("x")) as running, running.http() as http:
        answer = http.get("/")
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "http" not in answer.text.replace("https?:", "").replace("http-equiv", "")
        # A storage's own names are its methods, whatever is kept under them.
        assert not re.search(r"Storage\.(key|length|clear|[a-z]+Item\b(?!\())", answer.text)
