"""Many models behind one address, in real processes with made-up tokens."""

import http.client
import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.http.callers.keys import digest_of
from ipc.errors import ConfigError, EngineCoreError
from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Caller, serving, wait_for
from tests.frontend.http.stored.test_batches import answers, begin, ended, lines_of
from tests.placed import PREFIX
from tools.commands import chat as chat_command
from tools.commands import ps, serve, serve_models, stop
from tools.commands.http import HttpFront

OWNER = {"authorization": "Bearer owner"}
_OF_ALL = """
model = "{model}"
executor = "fake"
executor_options = {{vocab_size = "49152", max_model_len = "4096", step_us = "{step_us}"}}
kv_cache_memory_bytes = "{kv}"
"""


def table(name: str, *more: str, step_us: int = 4000, kv: str = "64M") -> str:
    lines = _OF_ALL.format(model=resolve_model(None), step_us=step_us, kv=kv)
    return "\n".join([f"[models.{name}]", lines, *more, ""])


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """Two models fit at the same time."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "keys").write_text(f"user {digest_of('user')} models=a,b\nowner {digest_of('owner')} manage=1\n")
    path = folder / "models.toml"
    models = (
        table("a", 'aliases = ["first"]'),
        table("b", 'system = "Be brief."'),
        table("vectors", 'runner = "pooling"'),
        table("big", kv="2G"),
        '[models.absent]\nmodel = "org/absent"\n',
    )
    path.write_text('memory = "700M"\n' + "".join(models))
    store = ("--store", str(folder / "store.db"))
    with serving("--models", str(path), "--api-key-file", str(folder / "keys"), *store) as caller:
        yield caller


def post(many: Caller, path: str, body: Any, key: str = "owner", method: str = "POST") -> Any:
    return many.call(method, path, body, {"authorization": f"Bearer {key}"})


def chat(many: Caller, model: str, **fields: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **fields}
    return post(many, "/v1/chat/completions", body)


def states(many: Caller) -> dict[str, str]:
    listed = post(many, "/v1/models", None, method="GET").json["data"]
    return {one["id"]: one["state"] for one in listed}


def unload(many: Caller, *names: str) -> None:
    for name in names:
        assert post(many, "/api/generate", {"model": name, "keep_alive": 0}).json["done_reason"] == "unload"
    wait_for(lambda: all(states(many)[name] == "unloaded" for name in names))


def processes(pid: int, module: str) -> list[int]:
    """The children of a process that run a module."""
    found = [int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()]
    return [one for one in found if PREFIX + module in Path(f"/proc/{one}/cmdline").read_bytes().decode().split("\0")]


class Stream:
    """A stream that is read line by line."""

    def __init__(self, many: Caller, model: str, num_tokens: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", many.port, timeout=60)
        body = {
            "model": model,
            "prompt": "Once",
            "max_tokens": num_tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        fields = {"content-type": "application/json", "authorization": "Bearer owner"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), fields)
        self._answer = self._connection.getresponse()
        self.texts, self.longest_gap_s, self._last = list[str](), 0.0, 0.0
        self.is_ended = False

    def close(self) -> None:
        self._answer.close()
        self._connection.close()

    def read(self, count: int = 1 << 30) -> str:
        """Read this many events, or all; return the text so far."""
        for _ in range(count):
            while not (line := self._answer.readline().strip()).startswith(b"data:"):
                assert line == b"" or line.startswith(b":"), line
            now = time.monotonic()
            self.longest_gap_s, self._last = max(self.longest_gap_s, now - (self._last or now)), now
            if line == b"data: [DONE]":
                self.is_ended = True
                self.close()
                break
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            self.texts += [one["text"] for one in event["choices"]]
        return "".join(self.texts)


def test_the_page_needs_no_key_and_loads_no_model(many: Caller) -> None:
    for path in ("/", "/page/page.js", "/page/page.css"):
        assert many.get(path).status == 200
    assert "loading" not in states(many).values()
    able = {one["id"]: one["capabilities"] for one in post(many, "/v1/models", None, method="GET").json["data"]}
    assert (able["a"], able["vectors"]) == (["completion", "tools"], ["embedding"])


def test_models_of_several_kinds_are_loaded_on_request(many: Caller) -> None:
    assert set(states(many)) == {"a", "b", "vectors", "big", "absent"}
    assert chat(many, "first").json["model"] == "first"
    answer = post(many, "/v1/embeddings", {"model": "vectors", "input": "text"})
    assert len(answer.json["data"][0]["embedding"]) > 1
    assert {name for name, state in states(many).items() if state == "loaded"} == {"a", "vectors"}
    shown = post(many, "/api/ps", None, method="GET").json["models"]
    assert {one["name"] for one in shown} == {"a:latest", "vectors:latest"}
    assert all(one["expires_at"] > "2026" and one["size"] > 64 << 20 for one in shown)


def test_the_least_recently_used_one_leaves(many: Caller) -> None:
    assert chat(many, "a").status == 200
    assert post(many, "/v1/embeddings", {"model": "vectors", "input": "text"}).status == 200
    for name in ("a", "b"):
        assert chat(many, name).status == 200
    assert (states(many)["a"], states(many)["vectors"]) == ("loaded", "unloaded")


def test_what_cannot_be_served_is_refused_by_name_and_size(many: Caller) -> None:
    answer = chat(many, "big")
    assert (answer.status, answer.headers["x-should-retry"]) == (507, "false")
    assert (
        "needs 2.4 GB (weights 0.0 MB, KV cache 2.1 GB); all models together may take 734.0 MB" in answer.body.decode()
    )
    answer = chat(many, "absent")
    assert answer.status == 503
    assert "engine-core pull org/absent" in answer.body.decode()
    assert (chat(many, "zz").status, chat(many, "zz").json["error"]["code"]) == (404, "model_not_found")
    assert chat(many, "a", keep_alive="soon").status == 400


def test_a_key_limits_models_and_changes(many: Caller) -> None:
    body = {"model": "vectors", "input": "text"}
    assert post(many, "/v1/embeddings", body, "user").status == 403
    listed = post(many, "/v1/models", None, "user", "GET").json["data"]
    assert [one["id"] for one in listed] == ["a", "b"]
    for path, change in (
        ("/api/copy", {"source": "a", "destination": "c"}),
        ("/api/pull", {"model": "a"}),
        ("/api/create", {"model": "c", "from": "a"}),
        ("/api/generate", {"model": "a", "keep_alive": 0}),
    ):
        answer = post(many, path, change, "user")
        assert (answer.status, "manage=1" in answer.json["error"]) == (403, True), path
    assert post(many, "/api/delete", {"model": "a"}, "user", "DELETE").status == 403


def test_models_are_created_copied_and_deleted(many: Caller) -> None:
    parameters = {"temperature": 0, "num_predict": 3, "num_ctx": 512}
    made = {"model": "made", "from": "a", "system": "Be kind.", "parameters": parameters, "stream": False}
    assert post(many, "/api/create", made).json == {"status": "success"}
    asked = {"model": "made", "messages": [{"role": "user", "content": "Hello"}], "stream": False}
    answer = post(many, "/api/chat", asked).json
    plain = chat(many, "a").json["usage"]["prompt_tokens"]
    assert (answer["eval_count"], answer["prompt_eval_count"] != plain) == (3, True)
    loaded = post(many, "/api/delete", {"model": "made"}, method="DELETE")
    assert (loaded.status, "unload it first" in loaded.json["error"]) == (400, True)
    assert post(many, "/api/copy", {"source": "made", "destination": "twin"}).status == 200
    unload(many, "made")
    for name in ("made", "twin:latest"):
        assert post(many, "/api/delete", {"model": name}, method="DELETE").status == 200
    assert not {"made", "twin"} & set(states(many))


def test_the_text_of_a_created_model_is_bounded(many: Caller) -> None:
    for field in ("system", "template"):
        made = {"model": "made", "from": "a", field: "{" + "x" * (200 << 10), "stream": False}
        answer = post(many, "/api/create", made)
        assert (answer.status, "131072 bytes of text" in answer.json["error"]) == (413, True), field
    assert chat(many, "a").status == 200  # the connection to the engines' process is as before
    assert "made" not in states(many)


def test_a_pull_without_network_says_so_by_name(many: Caller) -> None:
    lines = [json.loads(line) for line in post(many, "/api/pull", {"model": "org/absent"}).body.splitlines()]
    assert lines[0] == {"status": "pulling manifest"}
    assert "org/absent was not downloaded" in lines[-1]["error"]
    assert post(many, "/api/pull", {"model": "a", "stream": False}).json == {"status": "success"}


def test_the_commands_list_and_unload(
    many: Caller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENGINE_CORE_API_KEY", "owner")
    url = ("--url", f"http://127.0.0.1:{many.port}")
    assert chat(many, "a").status == 200
    assert ps.main(["--json", *url]) == 0
    listed = {one["name"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (listed["a"]["state"], listed["a"]["expires_at"][:2]) == ("loaded", "20")
    assert ps.main(["--all", *url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "STATE", "MEMORY", "UNTIL"]
    assert ["absent", "unavailable"] in [line.split() for line in lines]
    assert stop.main(["a", *url]) == 0
    wait_for(lambda: states(many)["a"] == "unloaded")
    with pytest.raises(ConfigError, match="answered 404: the model 'zz' is not served here"):
        stop.main(["zz", *url])
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:1"):
        ps.main(["--url", "http://127.0.0.1:1"])


def run(monkeypatch: pytest.MonkeyPatch, *words: str, stdin: str = "") -> int:
    """`engine-core run` with these words, in a pipe."""
    monkeypatch.setenv("ENGINE_CORE_API_KEY", "owner")
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    return chat_command.main(["--max-tokens", "6", "--ignore-eos", *words])


def test_run_asks_a_model_which_is_loaded_for_that(
    many: Caller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ("--url", f"http://127.0.0.1:{many.port}")
    unload(many, "a")
    assert run(monkeypatch, "a", "Hello", *url, "--temperature", "0") == 0
    answer = chat(many, "a", max_tokens=6, ignore_eos=True, temperature=0)
    assert states(many)["a"] == "loaded"
    assert capsys.readouterr().out == f"{answer.json['choices'][0]['message']['content']}\n"
    # A name without a slash is one of the server that is there if none is named.
    monkeypatch.setattr(chat_command, "DEFAULT_URL", url[1])
    assert run(monkeypatch, "first", "--temperature", "0", stdin="Hello") == 0
    assert capsys.readouterr().out == f"{answer.json['choices'][0]['message']['content']}\n"


def test_run_says_why_a_server_does_not_answer(many: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    url = ("--url", f"http://127.0.0.1:{many.port}")
    for words, message in (
        (("zz", "Hello", *url), "answered 404: the model 'zz' is not served here"),
        (("absent", "Hello", *url), "answered 503: the model 'absent' cannot be loaded"),
        (("a", "Hello", *url, "--temperature", "-1"), "temperature"),
        (("a", "Hello", *url, "--dtype", "float32"), "have their own options; leave out --dtype"),
        (("a", "Hello", *url, "--connect", "ipc:///tmp/x"), "leave out one of them"),
        (("a", "Hello", "--url", "ftp://x"), "--url must be a URL"),
        (("a", "Hello", "--url", "http://127.0.0.1:1"), r"no server answers at http://127\.0\.0\.1:1"),
        (("a", "Hello " * 9000, *url), "maximum context length"),
    ):
        with pytest.raises(EngineCoreError, match=message):
            run(monkeypatch, *words)
    monkeypatch.setattr(chat_command, "DEFAULT_URL", "http://127.0.0.1:1")
    with pytest.raises(
        EngineCoreError, match=r"'a' is no file, folder or name on the Hub, so .* but no server answers"
    ):
        run(monkeypatch, "a", "Hello")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "org/a"], "add --port 8000"),
        (["org/b", "--models", "org/a", "--port", "0"], "MODEL does not go together"),
        (["--models", "org/a", "--port", "0", "--standby", "import"], "--standby does not go"),
        (["--models", " , ", "--port", "0"], "--models takes a TOML file"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve.main(words)


def test_the_death_of_one_engine_does_not_disturb_the_others(many: Caller) -> None:
    unload(many, "a")
    alone = Stream(many, "b", 300).read()
    others = set(processes(many.process.pid, "core"))
    assert chat(many, "a").status == 200
    (killed,) = set(processes(many.process.pid, "core")) - others
    streams = [Stream(many, name, 300) for name in ("b", "a")]
    for stream in streams:
        stream.read(20)
    os.kill(killed, signal.SIGKILL)
    assert [stream.read() for stream in streams] == [alone, alone]
    assert others & set(processes(many.process.pid, "core"))


def test_what_is_stored_is_of_all_models(many: Caller) -> None:
    """A response in the background keeps its model, and loads it again; a batch has lines for several models."""
    unload(many, "a", "b", "vectors")
    body = {"model": "a", "input": "Hi", "max_output_tokens": 100, "ignore_eos": True, "seed": 5}
    wanted = post(many, "/v1/responses", {**body, "store": False}).json["output"][0]["content"]
    begun = post(many, "/v1/responses", {**body, "background": True}).json
    path = f"/v1/responses/{begun['id']}"
    assert post(many, "/api/generate", {"model": "a", "keep_alive": 0}).json["done_reason"] == "unload"
    assert states(many)["a"] != "unloaded"
    (worker,) = processes(many.process.pid, "frontend.http")
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: processes(many.process.pid, "frontend.http") not in ([], [worker]))
    wait_for(lambda: post(many, path, None, method="GET").json["status"] == "incomplete")
    assert post(many, path, None, method="GET").json["output"][0]["content"] == wanted
    later = {"model": "b", "input": "And?", "max_output_tokens": 4, "previous_response_id": begun["id"]}
    assert post(many, "/v1/responses", later).json["model"] == "b"
    unload(many, "a", "b")
    asked = {"prompt": "p", "max_tokens": 3}
    data = lines_of(*((name, "/v1/completions", {**asked, "model": name}) for name in ("a", "b", "zz")))
    made = begin(many, data, "/v1/completions", OWNER)
    found = ended(many, made["id"], OWNER)
    assert found["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    lines = answers(many, found["output_file_id"], OWNER)
    assert [one["response"]["body"]["model"] for one in lines] == ["a", "b"]


def test_the_engines_survive_the_http_server(many: Caller) -> None:
    assert chat(many, "a").status == 200
    before = processes(many.process.pid, "core")
    (worker,) = processes(many.process.pid, "frontend.http")
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: processes(many.process.pid, "frontend.http") not in ([], [worker]))
    assert chat(many, "a").status == 200
    assert processes(many.process.pid, "core") == before


class HeldFront(HttpFront):
    """One whose worker is started when it has been told to end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_told = threading.Event()

    def start(self, address: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert self.is_told.wait(60)
        super().start(address)

    def drain(self) -> None:
        super().drain()
        self.is_told.set()


def test_a_signal_before_the_http_server_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(serve_models, "HttpFront", HeldFront)
    (tmp_path / "models.toml").write_text(table("a"))
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        assert serve.main(["--models", str(tmp_path / "models.toml"), "--http", "127.0.0.1:0"]) == 0
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["models.toml"]
