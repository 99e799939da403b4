"""The page at /, in a headless Chromium: streaming, the stop button, parameters, the live view, errors.

Skipped where there is no Chromium. SCREENSHOTS=FOLDER python -m pytest ... writes the pictures of docs/http.md, with
the demo model: see test_screenshots.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.llm import LLM
from tests.frontend.http.browser import Page, browser, find_browser
from tests.frontend.http.caller import Caller, serving, wait_for

BROWSER = find_browser()
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
    pytest.mark.timeout(180),
]
SIZE = (1100, 760)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert BROWSER is not None
    with browser(BROWSER) as page:
        yield page


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('text').focus()")
    page.type(text)
    page.press_enter()


def test_it_streams_and_shows_what_it_took(served: Caller, page: Page) -> None:
    page.open(f"http://127.0.0.1:{served.port}/", *SIZE)
    page.wait_for("document.getElementById('model').textContent === 'demo'")
    page.run("document.getElementById('max_tokens').value = 40")
    page.run("document.getElementById('temperature').value = 0")
    page.run("document.getElementById('system').value = 'Be brief.'")
    ask(page, "Hello <b>there</b>")
    page.wait_for("document.querySelectorAll('.figures').length === 1")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <b>there</b>"}]
    answer = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 40, "temperature": 0})
    wanted = answer.json["choices"][0]["message"]["content"]
    assert page.run("document.querySelector('.assistant').textContent") == wanted
    assert page.run("document.querySelector('.user').textContent") == "Hello <b>there</b>"
    figures = page.run("document.querySelector('.figures').textContent")
    assert "first token" in figures
    assert "tokens/s" in figures
    assert f"{answer.json['usage']['completion_tokens']} out" in figures
    assert page.errors == []


def test_the_stop_button_ends_the_request(served: Caller, llm: LLM, page: Page) -> None:
    page.open(f"http://127.0.0.1:{served.port}/", *SIZE)
    page.run("document.getElementById('max_tokens').value = 3900")
    ask(page, "Go on")
    page.wait_for("!document.getElementById('stop').hidden")
    page.run("document.getElementById('stop').click()")
    page.wait_for("document.getElementById('stop').hidden && !document.getElementById('send').hidden")
    wait_for(lambda: llm.statistics().num_running == 0)
    ask(page, "Still there?")  # the conversation goes on
    page.run("document.getElementById('max_tokens').value = 5")
    page.wait_for("!document.getElementById('stop').hidden")
    page.run("document.getElementById('stop').click()")
    page.wait_for("document.getElementById('stop').hidden")
    assert page.run("document.querySelectorAll('.user').length") == 2
    assert page.errors == []


def test_the_live_view_and_errors(served: Caller, page: Page) -> None:
    page.open(f"http://127.0.0.1:{served.port}/", *SIZE)
    page.wait_for("document.getElementById('running').textContent.endsWith('/ 64')")
    page.wait_for("/^[0-9]+ %$/.test(document.getElementById('kv').textContent)")
    page.run("document.getElementById('temperature').value = -1")
    ask(page, "Hello")
    page.wait_for("document.querySelectorAll('.error').length === 1")
    assert "temperature" in page.run("document.querySelector('.error').textContent")
    page.errors.clear()  # the browser notes the status 400
    page.run("document.getElementById('clear').click()")
    assert page.run("document.querySelectorAll('.turn').length") == 0


def test_nothing_is_cut_off_in_a_small_window(served: Caller, page: Page) -> None:
    for width, height in ((1100, 760), (700, 500), (360, 640)):
        page.open(f"http://127.0.0.1:{served.port}/", width, height)
        assert page.run("document.documentElement.scrollWidth") <= width
        box = page.run("JSON.stringify(document.getElementById('send').getBoundingClientRect())")
        assert '"width":0' not in box
        assert page.run("document.getElementById('send').getBoundingClientRect().bottom") <= height
        assert page.run("document.getElementById('chat').clientWidth") > width / 2
    page.run("document.getElementById('more').click()")  # the last one has room for one side at a time
    assert page.run("document.getElementById('max_tokens').getBoundingClientRect().width") > 50


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="SCREENSHOTS names no folder")
def test_screenshots(page: Page) -> None:
    """Write the pictures of docs/http.md: the demo model answers, light and dark."""
    folder = Path(os.environ["SCREENSHOTS"])
    with serving("--served-model-name", "SmolLM2-135M-Instruct") as caller:
        page.set_dark(False)
        page.open(f"http://127.0.0.1:{caller.port}/", *SIZE)
        page.wait_for("document.getElementById('kv').textContent.endsWith('%')")
        page.run("document.getElementById('temperature').value = 0")
        ask(page, "Why is the sky blue?")
        page.wait_for("document.querySelectorAll('.figures').length === 1")
        page.run("document.getElementById('max_tokens').value = 400")
        ask(page, "Write a short poem about a lighthouse in winter.")
        page.wait_for("(document.querySelectorAll('.assistant')[1] || {textContent: ''}).textContent.length > 150")
        page.wait_for("document.getElementById('running').textContent.startsWith('1')")
        page.screenshot(folder / "http_page.png")
        page.set_dark(True)
        page.screenshot(folder / "http_page_dark.png")
        page.resize(360, 640)
        page.screenshot(folder / "http_page_small.png")
