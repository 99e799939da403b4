"""The routing table, its OpenAPI document, the page and the figures that the page shows."""

import hashlib
import re
from pathlib import Path

import pytest

from frontend.http import errors
from frontend.http.hints import ABSENT, OTHER_PATHS
from frontend.http.pages import page
from frontend.http.routes import ROUTES
from tests.frontend.http.caller import Caller

PAGE = Path(__file__).resolve().parents[3] / "docs" / "http.md"
WEB = Path(page.__file__).with_name("web")
#: Digests of what others have written.
VENDORED = {
    "marked.esm.js": "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    "purify.es.mjs": "5e8c53cd086a012531fc754ee6a7ad7a02e8a06fc4dadd805b912e128c3f6c58",
}


def test_the_description_is_the_table(served: Caller) -> None:
    found = served.get("/openapi.json").json
    assert found["openapi"].startswith("3.1")
    described = {
        (path.removesuffix("{name}"), method) for path, methods in found["paths"].items() for method in methods
    }
    assert described == {(route.path.removesuffix("{name}"), route.method.lower()) for route in ROUTES}
    chat = found["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatBody"}
    assert "messages" in found["components"]["schemas"]["ChatBody"]["required"]
    names = set(re.findall(r"#/components/schemas/(\w+)", str(found)))
    assert names <= set(found["components"]["schemas"])
    assert found["paths"]["/health"]["get"]["security"] == []
    assert chat["security"] == [{"key": []}]


def page_files(served: Caller) -> dict[str, str]:
    """The page's own files as they are served, by name; "" is the page."""
    texts, named = {"": served.get("/").body.decode()}, {"page.js", "page.css", "icon.svg"}
    while named - set(texts):
        for name in named - set(texts):
            answer = served.get(f"/page/{name}")
            assert answer.status == 200, name
            texts[name] = answer.body.decode()
        named |= {name for text in texts.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    return {name: text for name, text in texts.items() if name not in VENDORED}


def test_the_page_has_no_script_but_its_files(served: Caller) -> None:
    answer, types = served.get("/"), {"page.js": "text/javascript", "page.css": "text/css", "icon.svg": "image/svg+xml"}
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for name, kind in types.items():
        file = served.get(f"/page/{name}")
        assert file.headers["content-type"].split(";")[0] == kind
        assert file.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert (policy["img-src"], policy["require-trusted-types-for"]) == ("'self' data:", "'script'")
    for script in re.findall(r"<script[^>]*>.*?</script>|<style|\son\w+=|\sstyle=", answer.body.decode(), re.S):
        assert script == '<script type="module" src="page/page.js"></script>'


def test_the_page_asks_only_this_server(served: Caller) -> None:
    texts = page_files(served)
    own = {path.name for path in WEB.iterdir() if path.stem != "LICENSE"} - set(VENDORED) - {"index.html"}
    assert set(texts) == {"", *own}  # each is used
    foreign = r'https?://(?!www\.w3\.org/2000/svg")|@import|url\(|innerHTML|insertAdjacentHTML|\beval\b'
    assert {name: found for name, text in texts.items() if (found := re.findall(foreign, text))} == {}
    assert set(re.findall(r'(?:src|href)="([^"]+)"', texts[""])) == {"page/page.js", "page/page.css", "page/icon.svg"}
    asked = set(re.findall(r'call\(["`](v1/[a-z/]+)', texts["server.js"]))
    assert asked == {"v1/chat/completions", "v1/load", "v1/models"}  # next to it, under any path of a proxy
    assert [name for name, text in texts.items() if "fetch(" in text] == ["server.js"]


def test_the_page_has_no_other_files(served: Caller) -> None:
    for name in ("index.htm", "page.py", "..%2fpage.py", "LICENSE.marked", "__init__.py", "%2e%2e"):
        assert served.get(f"/page/{name}").status == 404, name


@pytest.mark.checkout  # NOTICE
def test_the_libraries_of_the_page_are_as_published() -> None:
    """Their digests are those of the packages marked 18.2.1 and dompurify 3.5.0, whose licences are next to them."""
    for name, digest in VENDORED.items():
        assert hashlib.sha256((WEB / name).read_bytes()).hexdigest() == digest, name
    notice = (WEB.parents[3] / "NOTICE").read_text()
    assert all(f"web/{name}" in notice for name in VENDORED)


def test_a_wrong_base_url_is_told_the_route(served: Caller) -> None:
    for path in ("/chat/completions", "/v1/v1/chat/completions", "//v1/chat/completions", "/v1/chat/completions/"):
        answer = served.post(path, {})
        assert (answer.status, answer.json["error"]["message"].split("; ")[1]) == (404, "there is /v1/chat/completions")
    assert served.post("/v1/api/chat", {}).json["error"]["message"].endswith("; there is /api/chat")
    for path, there in (("/generate", "/v1/completions"), ("/reranking", "/v1/rerank"), ("/load", "/v1/load")):
        assert served.post(path, {}).json["error"]["message"].endswith(f"; there is {there}")
    for path in (
        "/openai/deployments/demo/chat/completions",
        "/api/v1/chat/completions",
        "/v1/engines/demo/completions",
    ):
        there = "/v1/chat/completions" if "chat" in path else "/v1/completions"
        assert served.post(path, {}).json["error"]["message"].endswith(f"; there is {there}")
    assert served.get("/v1/models/").json["error"]["message"].endswith("'/v1/models/'; there is /v1/models")
    assert served.post("/nothing/at/all", {}).json["error"]["message"].endswith("'/nothing/at/all'")


def test_a_path_of_what_is_not_here_is_told_what_there_is(served: Caller) -> None:
    for path, told in (
        ("/v1/audio/speech", "answers with text"),
        ("/v1/threads/thread_1", "not stored here"),
        ("/v1/messages/batches", "engine-core batch"),
        ("/v1/load_lora_adapter", "engine-core control"),
        ("/sleep", "engine-core control"),
    ):
        answer = served.post(path, {})
        assert answer.status == 404
        assert told in answer.json["error"]["message"]


def test_other_paths_are_of_other_servers() -> None:
    ours = {route.path for route in ROUTES}
    assert not {f"/v1/{path}" for path in ABSENT} & ours
    assert set(OTHER_PATHS.values()) <= ours
    assert not ours & {f"{prefix}/{path}" for path in OTHER_PATHS for prefix in ("", "/v1")}


def test_the_load(served: Caller) -> None:
    served.chat(max_tokens=3)
    load = served.get("/v1/load").json
    assert load["age_s"] < 5
    assert (load["max_running"], load["running"]) == (64, 0)
    assert load["generated_tokens"] >= 3
    assert 0 <= load["kv_used"] <= 1
    assert load["events"] >= 1


def table_of(heading: str) -> str:
    """Return the rows of the first table below a heading of docs/http.md."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return "\n".join(line for line in section.splitlines() if line.startswith("| "))


@pytest.mark.checkout  # docs/
def test_the_page_has_every_route_and_no_other() -> None:
    rows = table_of("Routes").splitlines()
    listed = {path.removesuffix("{name}") for row in rows for path in re.findall(r"`(/[^`]*)`", row.split("|")[1])}
    assert listed == {route.path.removesuffix("{name}") for route in ROUTES}
    for route in ROUTES:
        row = next(row for row in rows if f"`{route.path}`" in row or f"`{route.path}{{name}}`" in row)
        assert re.search(rf"\b{route.method}\b", row.split("|")[1]), route


@pytest.mark.checkout  # docs/
def test_the_page_has_every_status() -> None:
    rows = table_of("Errors").splitlines()
    found = [int(one) for row in rows for one in re.findall(r"\d{3}", row.split("|")[1])]
    assert sorted(found) == sorted({*errors.ERROR_TYPES} - {499})
