"""The steps of `make page`. Run by the Python of its own environment, with the settings of __main__.py as JSON."""

import base64
import json
import re
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

SIZE = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 640}
ANSWER = ".assistant:not([aria-busy])"
#: Markup that would show itself: it sets a title, asks another server, or brings controls and styles of its own.
MARKUP = """A *quiet* answer with `code`.

<script>document.title = "script ran"</script>
<img src="x" onerror="document.title = 'handler ran'">
<svg onload="document.title = 'svg ran'"></svg>
<iframe srcdoc="<script>parent.document.title = 'frame ran'</script>"></iframe>
<style>body { display: none }</style>
<form action="http://127.0.0.1:9/"><input name="x"><button>Send</button></form>

[a link](javascript:document.title='link+ran') and [another](data:text/html,<script>1</script>)
and ![a picture](http://127.0.0.1:9/picture.png) and [a good one](https://example.org/a?b=1).

```html" onclick="document.title='class ran'
<b>bold in code</b>
```
"""
MARKDOWN = """## A heading

A paragraph with **bold**, *italic* and `code`.

1. one
2. two

| a | b |
|---|---|
| 1 | 2 |

> quoted

- [x] done

```python
def add(one, other):
    return one + other
```
"""


def png(side: int) -> bytes:
    """A picture of this many pixels on each side, of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\x20\x80\x60" * side for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


class Walk:
    """A browser and the two servers. errors: what pages wrote to their consoles."""

    def __init__(self, browser: Browser, settings: dict[str, Any]) -> None:
        self._browser, self.settings = browser, settings
        self.errors: list[str] = []

    def page(self, server: str, size: dict[str, int] = SIZE, **options: Any) -> Page:
        """A page of a new profile, on one of the servers; on the one with keys with the key."""
        page = self._browser.new_context(viewport=size, **options).new_page()
        page.on("console", lambda one: self.errors.append(one.text) if one.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{self.settings[server]}/")
        if server == "many":
            expect(page.locator("#state")).to_contain_text("a key is needed")
            page.fill("#key", self.settings["key"])
            page.press("#key", "Tab")
            self.errors.clear()  # the browser notes the status 401
        expect(page.locator("#model option")).not_to_have_count(0)
        return page


def ask(page: Page, text: str) -> None:
    """Send a message, and wait for its answer."""
    count = page.locator(ANSWER).count()
    page.fill("#text", text)
    page.press("#text", "Enter")
    expect(page.locator(f"{ANSWER}, .error")).to_have_count(count + 1, timeout=120_000)
    assert page.locator(".error").count() == 0, page.locator(".error").inner_text()


def answer_with(page: Page, text: str, parts: int = 7, reasoning: str = "") -> list[Any]:
    """Let the server's next answers be this text, after this reasoning -> the requests that were sent."""
    sent: list[Any] = []

    def fulfil(route: Route) -> None:
        sent.append(route.request.post_data_json)
        step = max(1, len(text) // parts)
        events: list[Any] = [{"delta": {"content": text[at : at + step]}} for at in range(0, len(text), step)]
        events[:0] = [{"delta": {"reasoning": reasoning}}] if reasoning else []
        lines = [{"choices": [one]} for one in events] + [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        details = {"prompt_tokens_details": {"cached_tokens": 48}}
        lines.append({"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 30, **details}})
        body = "".join(f"data: {json.dumps(one)}\n\n" for one in lines) + "data: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfil)
    return sent


def check_keys(walk: Walk) -> None:
    """Without a key and with a wrong one the page says so; the right one shows the models, also after a reload."""
    page = walk.page("single")  # a profile of its own; this server needs none
    assert page.locator("#state").inner_text() == ""
    page = walk.page("many")
    page.fill("#key", "wrong")
    page.press("#key", "Tab")
    expect(page.locator("#state")).to_contain_text("the key is unknown")
    assert page.evaluate("document.activeElement.id") == "key"
    page.fill("#key", walk.settings["key"])
    page.press("#key", "Tab")
    expect(page.locator("#state")).to_have_text("")
    page.reload()
    expect(page.locator("#model option")).not_to_have_count(0)
    assert page.evaluate("JSON.stringify(localStorage).includes('a key of this test')")
    assert page.context.cookies() == []
    walk.errors.clear()  # the browser notes the status 401


def check_models(walk: Walk) -> None:
    """Models that chat are listed with their state, adapters too; each answers, and loads when it is asked."""
    page = walk.page("many")
    labels = page.locator("#model option").all_inner_texts()
    assert [label.split(" (")[0] for label in labels] == [
        "chat",
        "made-up",
        "made-up + adapter polite",
        "eyes",
        "absent",
    ]
    assert "not loaded" in labels[1], labels
    assert page.locator("#model option[value=absent]").is_disabled()
    page.fill("#max_tokens", "5")
    for name in ("made-up", "polite"):
        page.select_option("#model", name)
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Hello")
        assert sent.value.post_data_json["model"] == name
    expect(page.locator("#model option").nth(1)).to_have_text("made-up")  # it is loaded
    page.reload()
    expect(page.locator("#model")).to_have_value("polite")


def check_answers(walk: Walk) -> None:
    """An answer streams, its figures are shown, and the second one finds the first one's tokens in the cache."""
    page = walk.page("single")
    page.fill("#max_tokens", "60")
    page.fill("#temperature", "0")
    page.fill("#system", "Be brief.")
    page.press("#system", "Tab")
    page.fill("#text", "Why is the sky blue?")
    page.press("#text", "Enter")
    expect(page.locator(".assistant[aria-busy] .words p")).to_be_visible()
    expect(page.locator(ANSWER)).to_have_count(1)
    ask(page, "Name three colours.")
    figures = page.locator(".figures").all_inner_texts()
    assert all(word in figures[0] for word in ("tokens in", "first token", "tokens/s", "60 out", "ended by its length"))
    assert int(page.locator(".figures .cached").last.inner_text().split()[0]) >= 48
    expect(page.locator("#running")).to_have_text("0 / 64")
    expect(page.locator("#kv")).to_contain_text("%")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".assistant[aria-busy]")).to_have_count(0, timeout=60_000)
    assert page.locator(ANSWER).count() == 2
    page.get_by_role("button", name="Edit").click()
    assert page.input_value("#text") == "Name three colours."
    assert page.locator(ANSWER).count() == 1


def check_stop(walk: Walk) -> None:
    """The stop button and Escape end an answer; what has arrived is kept, and the engine is free."""
    page = walk.page("many")
    page.select_option("#model", "made-up")
    for key in (None, "Escape"):
        page.fill("#text", "Go on")
        page.press("#text", "Enter")
        expect(page.locator("[aria-busy] .words")).to_have_text(re.compile(".{20}", re.S), timeout=60_000)
        expect(page.locator("[aria-busy] .waiting")).to_have_count(0)
        if key:
            page.keyboard.press(key)
        else:
            page.click("#stop")
        expect(page.locator("#send")).to_be_visible()
    assert page.locator(ANSWER).count() == 2
    expect(page.locator(".figures").last).to_contain_text("stopped")
    end = time.monotonic() + 20
    url = f"http://127.0.0.1:{walk.settings['many']}/v1/load?model=made-up"
    while page.request.get(url, headers={"authorization": f"Bearer {walk.settings['key']}"}).json()["running"]:
        assert time.monotonic() < end, "the request goes on"


def check_markdown(walk: Walk) -> None:
    """Markdown becomes elements, a block of code has its language and a button that copies it."""
    page = walk.page("single")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    sent = answer_with(page, MARKDOWN, reasoning="<i>First</i> I think.")
    ask(page, "Show me")
    thought = page.locator("details.thought")
    expect(thought).not_to_have_attribute("open", "")
    thought.locator("summary").click()
    expect(thought.locator(".plain_text")).to_have_text("<i>First</i> I think.")
    for name in ("h2", "strong", "em", "ol > li", "table td", "blockquote", "pre > code"):
        assert page.locator(f".assistant .words {name}").count(), name
    expect(page.locator(".code_head span")).to_have_text("python")
    expect(page.locator(".assistant li").last).to_contain_text("\u2611 done")
    page.get_by_role("button", name="copy this code").click()
    expect(page.locator("#spoken")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("def add(one, other):")
    assert "48 cached" in page.locator(".figures .cached").inner_text()
    ask(page, "Again")
    assert [one["content"] for one in sent[1]["messages"]] == ["Show me", MARKDOWN, "Again"]  # without the reasoning


def check_markup(walk: Walk) -> None:
    """Markup of an answer is text: nothing of it runs, asks a server or becomes a control, now and after a reload."""
    page = walk.page("single")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answer_with(page, MARKUP)
    ask(page, "<b>Hello</b>")
    for _ in range(2):
        expect(page.locator(ANSWER)).to_have_count(1)
        page.wait_for_timeout(300)
        assert page.title() == "<b>Hello</b> - engine-core"
        words = page.locator(".assistant .words")
        assert "<script>" in words.inner_text()
        found = words.evaluate("one => [...one.querySelectorAll('*')].map(each => each.localName)")
        assert not set(found) & {"script", "img", "svg", "iframe", "style", "form", "input", "b", "link", "object"}, (
            found
        )
        names = words.evaluate("one => [...one.querySelectorAll('*')].flatMap(each => each.getAttributeNames())")
        assert set(names) <= {"class", "href", "target", "rel", "title", "type", "aria-label", "tabindex"}, names
        links = words.evaluate("one => [...one.querySelectorAll('[href]')].map(each => each.getAttribute('href'))")
        assert links == ["http://127.0.0.1:9/picture.png", "https://example.org/a?b=1"]
        assert page.locator(".user b").count() == 0
        page.reload()
    home = f"http://127.0.0.1:{walk.settings['single']}/"
    assert [url for url in asked if not url.startswith(home)] == []
    # What the page itself forbids, if the two checks before it should fail.
    script = """async other => {
        const tried = document.createElement("script"), found = [];
        try { tried.textContent = "1"; } catch { found.push("text"); }
        try { document.body.innerHTML = "<b>x</b>"; } catch { found.push("markup"); }
        try { await fetch(other, {mode: "no-cors"}); } catch { found.push("fetch"); }
        return found.join();
    }"""
    other = f"http://127.0.0.1:{walk.settings['many']}/ready"  # it answers
    assert page.evaluate(script, other) == "text,markup,fetch"
    walk.errors.clear()  # the browser notes what it refused


def check_images(walk: Walk) -> None:
    """A model with eyes is sent images, chosen and pasted, large ones made smaller; another one is offered none."""
    page = walk.page("many")
    page.fill("#max_tokens", "4")
    assert not page.locator("#attach").is_visible()
    page.select_option("#model", "eyes")
    expect(page.locator("#attach")).to_be_visible()
    with tempfile.TemporaryDirectory() as folder:
        small, large, text = Path(folder, "small.png"), Path(folder, "large.png"), Path(folder, "text.png")
        small.write_bytes(png(64))
        large.write_bytes(png(2600))
        text.write_text("no picture")
        page.set_input_files("#files", [small, large])
        expect(page.locator("#images figure")).to_have_count(2)
        page.set_input_files("#files", text)
        expect(page.locator("#state")).to_contain_text("cannot read it as an image")
    data = base64.b64encode(png(32)).decode()
    page.evaluate(
        """data => {
        const bytes = Uint8Array.from(atob(data), one => one.charCodeAt(0)), pasted = new DataTransfer();
        pasted.items.add(new File([bytes], "pasted.png", {type: "image/png"}));
        const event = new ClipboardEvent("paste", {clipboardData: pasted, cancelable: true});
        document.getElementById("text").dispatchEvent(event);
    }""",
        data,
    )
    expect(page.locator("#images figure")).to_have_count(3)
    page.get_by_label("remove image 2").click()
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "What is this?")
    *parts, words = request.value.post_data_json["messages"][0]["content"]
    sent = [part["image_url"]["url"] for part in parts]
    assert sent == [f"data:image/png;base64,{base64.b64encode(png(side)).decode()}" for side in (64, 32)]
    assert words == {"type": "text", "text": "What is this?"}
    assert int(page.locator(".figures span").first.inner_text().split()[0]) > 2 * 16  # tokens of the images
    page.reload()
    expect(page.locator(".user img")).to_have_count(2)
    assert page.evaluate("[...document.querySelectorAll('.user img')].map(one => one.naturalWidth).join()") == "64,32"


def check_sizes_of_images(walk: Walk) -> None:
    """A large image is made smaller before it is sent."""
    page = walk.page("many")
    page.select_option("#model", "eyes")
    expect(page.locator("#attach")).to_be_visible()
    answer_with(page, "Seen.")
    page.set_input_files("#files", {"name": "large.png", "mimeType": "image/png", "buffer": png(2600)})
    expect(page.locator("#images figure")).to_have_count(1)
    ask(page, "")
    assert page.evaluate("document.querySelector('.user img').naturalWidth") == 2048
    assert page.locator("#chat_list .open").inner_text() == "Image"


def check_conversations(walk: Walk) -> None:
    """Conversations are kept over a reload, listed, renamed, exported and deleted."""
    page = walk.page("single")
    answer_with(page, "An answer.")
    ask(page, "The first question")
    page.click("#new_chat")
    ask(page, "The second question")
    titles = page.locator("#chat_list .open")
    assert titles.all_inner_texts() == ["The second question", "The first question"]
    page.reload()
    expect(page.locator(".user")).to_contain_text("The second question")
    titles.nth(1).click()
    expect(page.locator(".user")).to_contain_text("The first question")
    more = page.get_by_role("button", name="rename, export or delete: The first question")
    more.click()
    page.get_by_role("button", name="Rename", exact=True).click()
    page.fill("#ask_value", "Renamed <i>")
    page.press("#ask_value", "Enter")
    expect(page.locator("#chat_list .current .open")).to_have_text("Renamed <i>")
    page.get_by_role("button", name="rename, export or delete: Renamed <i>").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    kept = json.loads(Path(download.value.path()).read_text())["conversations"]
    assert [one["content"] for one in kept[0]["messages"]] == ["The first question", "An answer."]
    page.get_by_role("button", name="Delete", exact=True).click()
    page.keyboard.press("Escape")
    assert titles.count() == 2
    page.get_by_role("button", name="Delete", exact=True).click()
    page.click("#ask_yes")
    expect(titles).to_have_count(1)
    expect(page.locator(".turn")).to_have_count(0)
    with page.expect_download() as download:
        page.click("#export_all")
    assert len(json.loads(Path(download.value.path()).read_text())["conversations"]) == 1


def check_removal(walk: Walk) -> None:
    """A conversation that is deleted while its answer arrives stays deleted."""
    page = walk.page("many")
    page.select_option("#model", "made-up")
    page.fill("#text", "Go on")
    page.press("#text", "Enter")
    expect(page.locator("[aria-busy] .words")).to_have_text(re.compile(".{20}", re.S), timeout=60_000)
    page.get_by_role("button", name="rename, export or delete: Go on").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.click("#ask_yes")
    expect(page.locator("#chat_list li")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()
    page.reload()
    expect(page.locator("#model option")).not_to_have_count(0)
    assert page.locator(".turn, #chat_list li").count() == 0


def check_storage(walk: Walk) -> None:
    """A full storage is said, a damaged entry is skipped, and another tab's changes are shown."""
    page = walk.page("single")
    answer_with(page, "An answer.")
    page.evaluate("localStorage.setItem('engine-core:/:chat:1-2-3', '{damaged')")
    page.evaluate("localStorage.setItem('engine-core:/:chat:4-5-6', '{\"messages\": 7}')")
    ask(page, "A question")
    assert page.locator("#chat_list .open").all_inner_texts() == ["A question"]
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator(".user")).to_contain_text("A question")
    ask(page, "One more")
    expect(other.locator(".user")).to_have_count(2)
    page.evaluate("""() => {
        let size = 1 << 22;
        for (let at = 0; size > 8; at++) {
            try { localStorage.setItem("other" + at, "x".repeat(size)); } catch { size >>= 1; }
        }
    }""")
    page.click("#new_chat")
    ask(page, "Too much " * 40)
    expect(page.locator("#storage")).to_contain_text("storage is full")


def check_errors(walk: Walk) -> None:
    """A refusal is shown with the server's words, and the question can be sent again."""
    page = walk.page("single")
    page.fill("#temperature", "-1")
    page.fill("#text", "Hello")
    page.press("#text", "Enter")
    expect(page.locator(".error")).to_contain_text("temperature")
    walk.errors.clear()  # the browser notes the status 400
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "4")
    page.reload()  # the values were kept
    expect(page.locator(".error")).to_contain_text("no answer to this yet")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(ANSWER)).to_have_count(1, timeout=60_000)
    assert page.locator(".error").count() == 0


def check_keyboard_and_names(walk: Walk) -> None:
    """Everything is reached with the keyboard and has a name."""
    page = walk.page("single")
    answer_with(page, MARKDOWN)
    ask(page, "Hello")
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"model", "show_settings", "new_chat", "Hello", "chat", "send", "system", "max_tokens", "key"} <= seen, seen
    nameless = page.evaluate("""[...document.querySelectorAll("button, input, select, textarea, img")].filter(
        one => one.checkVisibility() && !(one.ariaLabel || one.textContent.trim() || one.alt || one.labels?.length)
    ).map(one => one.outerHTML)""")
    assert nameless == []


def check_sizes(walk: Walk) -> None:
    """Nothing is cut off in a small window, which shows one side at a time."""
    for width, height in ((1280, 800), (900, 600), (360, 640)):
        page = walk.page("single", {"width": width, "height": height})
        answer_with(page, MARKDOWN + "\n```text\n" + "wide " * 80 + "\n```\n")
        ask(page, "A long word: " + "w" * 300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.getElementById('chat').scrollWidth") <= page.evaluate("chat.clientWidth")
        assert page.evaluate("document.getElementById('send').getBoundingClientRect().bottom") <= height
        assert page.evaluate("document.getElementById('chat').clientWidth") > width / 3
        page.context.close()
    page = walk.page("single", PHONE, has_touch=True)
    page.click("#show_chats")
    assert page.locator("#new_chat").is_visible()
    page.click("#show_settings")
    assert page.locator("#max_tokens").is_visible()
    assert not page.locator("#new_chat").is_visible()
    page.click("#show_settings")
    assert page.locator("#text").is_visible()


def check_pictures(walk: Walk) -> None:
    """Write pictures of the page, if a folder is named."""
    if not walk.settings["pictures"]:
        return
    folder = Path(walk.settings["pictures"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, size, scheme in (("", SIZE, "light"), ("_dark", SIZE, "dark"), ("_small", PHONE, "light")):
        page = walk.page("single", color_scheme=scheme)
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "300")
        page.set_viewport_size(size)
        page.reload()
        ask(page, "Why is the sky blue?")
        ask(page, "Write a Python function that adds two numbers, and explain it.")
        page.screenshot(path=folder / f"http_page{name}.png")
    page = walk.page("many", SIZE, color_scheme="dark")
    page.select_option("#model", "eyes")
    page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": png(64)})
    page.screenshot(path=folder / "http_page_images.png")
    answer_with(page, MARKDOWN)
    ask(page, "What is this?")
    page.screenshot(path=folder / "http_page_markdown.png")
    page.get_by_role("button", name="rename, export or delete: What is this?").click()
    page.get_by_role("button", name="Rename", exact=True).click()
    page.screenshot(path=folder / "http_page_rename.png")
    page.keyboard.press("Escape")
    page.set_viewport_size(PHONE)
    page.reload()
    page.screenshot(path=folder / "http_page_phone.png")
    for button in ("show_chats", "show_settings"):
        page.click(f"#{button}")
        page.screenshot(path=folder / f"http_page_phone_{button}.png")


def main() -> int:
    """Take all steps, or those whose names have one of the given texts; return 1 if one failed."""
    settings = json.loads(sys.argv[1])
    steps: list[Callable[[Walk], None]] = [one for name, one in globals().items() if name.startswith("check_")]
    num_failed = 0
    with sync_playwright() as playwright:
        # Tests may run as root, for which Chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=settings["browser"], args=["--no-sandbox"])
        expect.set_options(timeout=30_000)
        for step in steps:
            if settings["names"] and not any(name in step.__name__ for name in settings["names"]):
                continue
            walk, begin = Walk(browser, settings), time.monotonic()
            try:
                step(walk)
                assert walk.errors == [], walk.errors
                result = "ok"
            except Exception:
                num_failed, result = num_failed + 1, "failed"
                traceback.print_exc()
            print(f"{result:7}{(step.__doc__ or '').splitlines()[0]:112}{time.monotonic() - begin:6.1f} s", flush=True)
            for context in browser.contexts:
                context.close()
        browser.close()
    print(f"{num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
