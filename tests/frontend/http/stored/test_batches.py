"""Files and batches over HTTP: what callers send, and what is there after the server was killed."""

import contextlib
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.http.stored.upload import MAX_OF_TENANT
from ipc.errors import ConfigError
from tests.frontend.http.caller import Answer, Caller, serving, wait_for
from tests.frontend.http.conftest import FAKE
from tests.frontend.http.stored.test_responses import DEMO, SLOW, child_of
from tools.commands.batch import main
from tools.service import remote_batch

KEYS = {"alice": "secret-a", "bob": "secret-b"}
ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in KEYS.values())
EDGE = "edge-7f3c"


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = tmp_path_factory.mktemp("store")
    lines = [f"{name} {hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items()]
    (folder / "keys").write_text("\n".join(lines))
    options = ("--store", str(folder / "store.db"), "--store-bytes", "64M", "--api-key-file", str(folder / "keys"))
    with serving(*FAKE, *DEMO, *options, "--max-body-bytes", "64K", "--max-file-bytes", "2M") as caller:
        yield caller


def form(data: bytes, **fields: str) -> bytes:
    parts = [
        b'content-disposition: form-data; name="%b"\r\n\r\n%b' % (name.encode(), value.encode())
        for name, value in fields.items()
    ]
    head = b'content-disposition: form-data; name="file"; filename="in.jsonl"\r\ncontent-type: text/plain\r\n\r\n'
    whole = [b"--%b\r\n%b\r\n" % (EDGE.encode(), part) for part in (*parts, head + data)]
    return b"".join(whole) + f"--{EDGE}--\r\n".encode()


def upload(caller: Caller, data: bytes, headers: dict[str, str] = ALICE, **fields: str) -> Answer:
    kind = {"content-type": f"multipart/form-data; boundary={EDGE}"}
    return caller.call("POST", "/v1/files", form(data, **{"purpose": "batch", **fields}), {**headers, **kind})


def lines_of(*requests: tuple[str, str, Any]) -> bytes:
    made = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, url, body in requests]
    return b"".join(json.dumps(one).encode() + b"\n" for one in made)


def begin(caller: Caller, data: bytes, endpoint: str, headers: dict[str, str] = ALICE, **fields: Any) -> Any:
    source = upload(caller, data, headers).json["id"]
    body = {"input_file_id": source, "endpoint": endpoint, "completion_window": "24h", **fields}
    answer = caller.post("/v1/batches", body, headers)
    assert answer.status == 200, answer.body
    return answer.json


def ended(caller: Caller, batch_id: str, headers: dict[str, str] = ALICE, seconds: float = 60) -> Any:
    path, found = f"/v1/batches/{batch_id}", list[Any]()

    def has_ended() -> bool:
        with contextlib.suppress(OSError):
            found.append(caller.get(path, headers).json)
        return bool(found) and found[-1]["status"] in ("completed", "failed", "expired", "cancelled")

    wait_for(has_ended, seconds)
    return found[-1]


def answers(caller: Caller, file_id: str, headers: dict[str, str] = ALICE) -> list[Any]:
    answer = caller.get(f"/v1/files/{file_id}/content", headers)
    assert answer.status == 200, answer.body
    return [json.loads(one) for one in answer.body.splitlines()]


def test_a_file_is_kept_for_its_key(storing: Caller) -> None:
    data = random.Random(1).randbytes(1_100_000)  # larger than other bodies may be, and than a part
    made = upload(storing, data, purpose="user_data").json
    assert (made["object"], made["bytes"], made["filename"]) == ("file", len(data), "in.jsonl")
    assert (made["purpose"], made["status"], made["expires_at"]) == ("user_data", "processed", None)
    path = f"/v1/files/{made['id']}"
    assert storing.get(path, ALICE).json == made
    content = storing.get(f"{path}/content", ALICE)
    assert content.body == data
    assert content.headers["content-type"] == "application/octet-stream"
    later = upload(storing, b"{}", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}).json
    assert later["expires_at"] == later["created_at"] + 3600
    listed = storing.get("/v1/files", ALICE).json
    assert [one["id"] for one in listed["data"]] == [later["id"], made["id"]]
    assert [one["id"] for one in storing.get("/v1/files?purpose=batch", ALICE).json["data"]] == [later["id"]]
    page = storing.get(f"/v1/files?limit=1&order=asc&after={made['id']}", ALICE).json
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([later["id"]], False)
    for answer in (
        storing.get(path, BOB),
        storing.get(f"{path}/content", BOB),
        storing.call("DELETE", path, None, BOB),
    ):
        assert (answer.status, answer.json["error"]["message"]) == (404, f"there is no file '{made['id']}'")
    assert storing.get("/v1/files", BOB).json["data"] == []
    for one in (made, later):
        deleted = storing.call("DELETE", f"/v1/files/{one['id']}", None, ALICE).json
        assert deleted == {"id": one["id"], "object": "file", "deleted": True}
    assert storing.get(f"{path}/content", ALICE).status == 404


def test_wrong_uploads_are_refused_and_leave_nothing(storing: Caller) -> None:
    kind = {**ALICE, "content-type": f"multipart/form-data; boundary={EDGE}"}
    whole = form(b"abc", purpose="batch")
    two = form(b"abc", purpose="batch").replace(b'name="purpose"', b'name="file"')
    for body, headers, words in (
        (whole, {**ALICE, "content-type": "application/json"}, "multipart/form-data"),
        (whole[:-10], kind, "ends before its last boundary"),
        (b"--wrong\r\n", kind, "cannot be read"),
        (two, kind, "two files"),
        (form(b"", purpose="batch"), kind, "the file is empty"),
        (form(b"abc", purpose="x"), kind, "purpose must be one of"),
        (form(b"abc", purpose="x" * 5000), kind, "more than 4096 bytes"),
        (form(b"abc", **{"purpose": "batch", "expires_after[seconds]": "1"}), kind, "expires_after"),
        (form(b"abc", **{f"f{number}": "x" for number in range(40)}), kind, "more than 32 fields"),
        (whole.replace(b"form-data", b"other"), kind, "no content-disposition"),
    ):
        answer = storing.call("POST", "/v1/files", body, headers)
        assert answer.status == 400, body[:80]
        assert words in answer.json["error"]["message"]
    assert upload(storing, bytes(3 << 20)).status == 413
    assert storing.post("/v1/chat/completions", {"messages": "x" * 100_000}, ALICE).status == 413
    page = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}
    assert storing.call("POST", "/v1/files", whole, {**kind, **page}).status == 415
    assert storing.get("/v1/files", ALICE).json["data"] == []


def test_a_key_has_a_few_uploads_at_the_same_time(storing: Caller) -> None:
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS['alice']}\r\n"
    head += f"content-type: multipart/form-data; boundary={EDGE}\r\ncontent-length: 9999\r\n\r\n"
    with contextlib.ExitStack() as open_ones:
        for _ in range(MAX_OF_TENANT):
            open_ones.enter_context(storing.socket()).sendall(head.encode() + form(b"abc")[:100])
        wait_for(lambda: upload(storing, b"abc").status == 429)
        assert upload(storing, b"abc", BOB).status == 200
    wait_for(lambda: upload(storing, b"abc").status == 200)
    for headers in (ALICE, BOB):
        for one in storing.get("/v1/files", headers).json["data"]:
            assert storing.call("DELETE", f"/v1/files/{one['id']}", None, headers).status == 200


def test_a_batch_answers_its_lines_as_requests(storing: Caller) -> None:
    fields = {"max_tokens": 6, "seed": 5}
    chat = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    requests = [(f"c{number}", "/v1/chat/completions", {**chat, "seed": number}) for number in range(5)]
    requests.append(("wrong", "/v1/chat/completions", {**chat, "temperature": -1}))
    made = begin(storing, lines_of(*requests), "/v1/chat/completions", metadata={"for": "tests"})
    assert made["status"] == "validating"
    assert (made["object"], made["metadata"]) == ("batch", {"for": "tests"})
    assert made["expires_at"] == made["created_at"] + 86_400
    found = ended(storing, made["id"])
    assert found["status"] == "completed", found
    assert found["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
    output, errors = answers(storing, found["output_file_id"]), answers(storing, found["error_file_id"])
    assert [one["custom_id"] for one in output] == [f"c{number}" for number in range(5)]
    for number, one in enumerate(output):
        same = storing.post("/v1/chat/completions", {**chat, "seed": number}, ALICE).json
        assert one["response"]["body"]["choices"] == same["choices"]
        assert (one["response"]["status_code"], one["error"]) == (200, None)
    assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
    file = storing.get(f"/v1/files/{found['output_file_id']}", ALICE).json
    assert (file["purpose"], file["filename"]) == ("batch_output", "in_output.jsonl")
    assert file["bytes"] == len(storing.get(f"/v1/files/{file['id']}/content", ALICE).body)
    assert storing.get("/v1/batches", ALICE).json["data"][0] == found
    assert storing.get(f"/v1/batches/{made['id']}", BOB).status == 404
    assert storing.post(f"/v1/batches/{made['id']}/cancel", {}, BOB).status == 404
    assert storing.post(f"/v1/batches/{made['id']}/cancel", {}, ALICE).json == found
    assert storing.get(f"/v1/files/{file['id']}", BOB).status == 404


def test_responses_and_completions_of_a_batch(storing: Caller) -> None:
    body = {"input": "Hi", "max_output_tokens": 4}
    requests = [("a", "/v1/responses", body), ("b", "/v1/responses", {**body, "store": True})]
    found = ended(storing, begin(storing, lines_of(*requests), "/v1/responses")["id"])
    responses = [one["response"]["body"] for one in answers(storing, found["output_file_id"])]
    assert [one["store"] for one in responses] == [False, True]
    assert [storing.get(f"/v1/responses/{one['id']}", ALICE).status for one in responses] == [404, 200]
    data = lines_of(
        *((f"c{number}", "/v1/completions", {"prompt": f"p {number}", "max_tokens": 3}) for number in range(3))
    )
    found = ended(storing, begin(storing, data, "/v1/completions")["id"])
    assert found["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert found["error_file_id"] is None
    found = ended(
        storing, begin(storing, lines_of(("v", "/v1/embeddings", {"input": ["p", "q"]})), "/v1/embeddings")["id"]
    )
    (vectors,) = answers(storing, found["output_file_id"])
    assert len(vectors["response"]["body"]["data"]) == 2


def test_wrong_batches_are_refused_by_name(storing: Caller) -> None:
    data = lines_of(("a", "/v1/completions", {"prompt": "p"}))
    source, other = upload(storing, data).json["id"], upload(storing, data, purpose="user_data").json["id"]
    body = {"input_file_id": source, "endpoint": "/v1/completions", "completion_window": "24h"}
    for wrong, param in (
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"input_file_id": other}, "input_file_id"),
        ({"metadata": {"x": "y" * 600}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ):
        answer = storing.post("/v1/batches", {**body, **wrong}, ALICE)
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
    answer = storing.post("/v1/batches", body, BOB)
    assert (answer.status, answer.json["error"]["param"]) == (400, "input_file_id")
    found = ended(storing, begin(storing, b"{}\n" + data, "/v1/chat/completions")["id"])
    assert found["status"] == "failed"
    assert [one["line"] for one in found["errors"]["data"]] == [1, 2]


def test_a_server_without_a_store_has_no_files(served: Caller) -> None:
    for answer in (upload(served, b"x", {}), served.get("/v1/files"), served.get("/v1/batches/x")):
        assert (answer.status, answer.json["error"]["message"]) == (
            404,
            "nothing is stored here: the server was started without --store",
        )


def long_line(number: int) -> Any:
    return {"prompt": f"p {number}", "max_tokens": 60, "ignore_eos": True, "seed": number}


def long_lines(count: int) -> bytes:
    return lines_of(*((f"c{number}", "/v1/completions", long_line(number)) for number in range(count)))


def texts(caller: Caller, batch: Any) -> list[tuple[str, str]]:
    assert batch["status"] == "completed", batch
    found = answers(caller, batch["output_file_id"], {})
    return [(one["custom_id"], one["response"]["body"]["choices"][0]["text"]) for one in found]


def test_a_batch_gives_way_is_cancelled_and_goes_on_after_kills(tmp_path: Path) -> None:
    """The HTTP process, then the whole service, then the engine are killed."""
    options = (*FAKE, *SLOW, *DEMO, "--store", str(tmp_path / "store.db"), "--batch-requests", "8")
    made: Any = None
    stopped = ""
    with contextlib.suppress(AssertionError), serving(*options) as caller:  # of its exit status
        made = begin(caller, long_lines(40), "/v1/completions", {})
        answer = caller.call("DELETE", f"/v1/files/{made['input_file_id']}", None, {})
        was_refused = (answer.status, "cancel it first" in answer.json["error"]["message"]) == (400, True)
        wait_for(lambda: caller.get(f"/v1/batches/{made['id']}").json["request_counts"]["completed"] >= 8)
        num_running = caller.get("/v1/load").json["running"]
        os.kill(child_of(caller, b"frontend.http"), signal.SIGKILL)
        stopped = begin_again(caller)
        end_all(caller)
    assert (was_refused, num_running <= 8) == (True, True)
    with serving(*options) as caller:
        os.kill(child_of(caller, b"core"), signal.SIGKILL)
        assert ended(caller, stopped, {})["status"] == "cancelled"
        found = ended(caller, made["id"], {})
        assert found["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        pairs = texts(caller, found)
        assert [name for name, _ in pairs] == [f"c{number}" for number in range(40)]
        for number in range(0, 40, 4):
            undisturbed = caller.post("/v1/completions", long_line(number)).json["choices"][0]["text"]
            assert pairs[number][1] == undisturbed


def test_the_command_uses_the_batches_of_a_server(
    storing: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_batch, "_POLL_S", 0.05)
    monkeypatch.setenv("ENGINE_CORE_API_KEY", KEYS["bob"])
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests = [(f"c{number}", "/v1/completions", {"prompt": "p", "max_tokens": 2}) for number in range(3)]
    source.write_bytes(lines_of(*requests, ("wrong", "/v1/completions", {"prompt": "p", "max_tokens": -1})))
    command = [str(source), "-o", str(target), "--url", f"http://127.0.0.1:{storing.port}"]
    assert main(command) == 1
    assert "4 answered in" in capsys.readouterr().err
    first = target.read_bytes()
    assert [json.loads(one)["custom_id"] for one in first.splitlines()] == ["c0", "c1", "c2", "wrong"]
    target.unlink()
    assert main(command) == 1  # it finds its batch
    assert target.read_bytes() == first
    assert len(storing.get("/v1/batches", BOB).json["data"]) == 1
    with pytest.raises(ConfigError, match="leave out --connect"):
        main([*command, "--connect", "ipc:///x"])
    source.write_bytes(lines_of(("a", "/v1/completions", {"prompt": "p"}), ("b", "/v1/embeddings", {"input": "p"})))
    with pytest.raises(ConfigError, match="make a file for each"):
        main(command)
    assert sorted(tmp_path.iterdir()) == [source, target]


@pytest.mark.soak
def test_no_line_is_lost_doubled_or_different_under_random_kills(tmp_path: Path) -> None:
    """Twenty batches, while the HTTP process, the engine and the whole service are killed at random."""
    draw, num_batches = random.Random(11), 20
    options = (*FAKE, "--executor-option", "step_us=1000", *DEMO, "--store", str(tmp_path / "store.db"))
    data = long_lines(200)
    with serving(*options) as caller:
        wanted = texts(caller, ended(caller, begin(caller, data, "/v1/completions", {})["id"], {}))
        assert len(wanted) == 200
        begun = [begin(caller, data, "/v1/completions", {})["id"] for _ in range(num_batches)]
    for _ in range(12):
        with contextlib.suppress(AssertionError), serving(*options) as caller:
            for _ in range(draw.randrange(3)):
                time.sleep(draw.uniform(0, 2))
                with contextlib.suppress(ProcessLookupError, StopIteration):
                    os.kill(child_of(caller, draw.choice([b"frontend.http", b"core"])), signal.SIGKILL)
            time.sleep(draw.uniform(0, 2))
            end_all(caller)
    with serving(*options) as caller:
        for batch_id in begun:
            found = ended(caller, batch_id, {}, 300)
            assert found["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
            assert texts(caller, found) == wanted


def end_all(caller: Caller) -> None:
    """Kill a server with its HTTP process."""
    with contextlib.suppress(StopIteration):
        worker = child_of(caller, b"frontend.http")
        caller.process.kill()
        with contextlib.suppress(ProcessLookupError):  # it ends by itself too
            os.kill(worker, signal.SIGKILL)
    caller.process.kill()


def begin_again(caller: Caller) -> str:
    """Begin and cancel a batch, once a server that lives answers; return its id."""
    while True:
        with contextlib.suppress(OSError, KeyError):
            batch_id: str = begin(caller, long_lines(100), "/v1/completions", {})["id"]
            break
        time.sleep(0.05)
    wait_for(lambda: caller.get(f"/v1/batches/{batch_id}").json["status"] == "in_progress")
    assert caller.post(f"/v1/batches/{batch_id}/cancel", {}).json["status"] in ("cancelling", "cancelled")
    return batch_id
