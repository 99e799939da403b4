"""Stored responses: what is kept, for whom, and what continues it."""

import contextlib
import hashlib
import http.client
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Answer, Caller, serving, wait_for
from tests.frontend.http.conftest import FAKE
from tests.frontend.http.openai.test_responses import TOOL, events_of
from tests.placed import PREFIX

KEYS = {"alice": "secret-a", "bob": "secret-b", "carol": "secret-c"}
ALICE, BOB, CAROL = ({"authorization": f"Bearer {key}"} for key in KEYS.values())
DEMO = ("-m", str(resolve_model(None)), "--served-model-name", "demo")


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = tmp_path_factory.mktemp("store")
    lines = [f"{name} {hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items()]
    (folder / "keys").write_text("\n".join(lines) + " store_bytes=9000")
    options = ("--store", str(folder / "store.db"), "--store-bytes", "1M", "--api-key-file", str(folder / "keys"))
    options += ("--store-key-bytes", "2M")
    with serving(*FAKE, *DEMO, *options) as caller:
        yield caller


def create(caller: Caller, headers: dict[str, str] = ALICE, **fields: Any) -> Any:
    body = {"input": "Hi", "max_output_tokens": 8, "seed": 5, **fields}
    answer = caller.post("/v1/responses", body, headers)
    assert answer.status == 200, answer.body
    return events_of(answer)[-1]["response"] if fields.get("stream") else answer.json


def texts(items: list[Any]) -> list[str]:
    return [part["text"] for item in items for part in item.get("content") or []]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_kept_until_it_is_deleted(storing: Caller, stream: bool) -> None:
    made = create(storing, stream=stream)
    assert (made["store"], made["previous_response_id"]) == (True, None)
    path = f"/v1/responses/{made['id']}"
    assert storing.get(path, ALICE).json == made
    for answer in (
        storing.get(path, BOB),
        storing.get(f"{path}/input_items", BOB),
        storing.call("DELETE", path, None, BOB),
    ):
        assert (answer.status, answer.json["error"]["message"]) == (404, f"there is no response '{made['id']}'")
    assert storing.call("DELETE", path, None, ALICE).json == {"id": made["id"], "object": "response", "deleted": True}
    assert storing.get(path, ALICE).status == storing.call("DELETE", path, None, ALICE).status == 404


def test_a_response_that_is_not_to_be_stored_is_not(storing: Caller) -> None:
    made = create(storing, store=False)
    assert made["store"] is False
    assert storing.get(f"/v1/responses/{made['id']}", ALICE).status == 404


def test_a_continued_response_is_that_of_the_whole_history(storing: Caller) -> None:
    first = create(storing, instructions="Be brief.")
    second = create(storing, input="And now?", previous_response_id=first["id"])
    third = create(storing, input="More", previous_response_id=second["id"], stream=True, instructions="Sing.")
    history = [
        {"role": "user", "content": "Hi"},
        *first["output"],
        {"role": "user", "content": "And now?"},
        *second["output"],
        {"role": "user", "content": "More"},
    ]
    whole = create(storing, input=history, instructions="Sing.", store=False)
    assert texts(third["output"]) == texts(whole["output"]) != texts(second["output"])
    assert third["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert third["previous_response_id"] == second["id"]
    # What later responses continue outlives its own deletion, for them alone.
    assert storing.call("DELETE", f"/v1/responses/{first['id']}", None, ALICE).status == 200
    again = create(storing, input="More", previous_response_id=second["id"], instructions="Sing.")
    assert texts(again["output"]) == texts(third["output"])
    for headers, response_id in ((ALICE, first["id"]), (BOB, second["id"]), (ALICE, "resp_none")):
        body = {"input": "x", "previous_response_id": response_id}
        answer = storing.post("/v1/responses", body, headers)
        error = answer.json["error"]
        assert (answer.status, error["param"]) == (400, "previous_response_id")
        assert error["code"] == "previous_response_not_found"


def test_the_items_of_the_input(storing: Caller) -> None:
    first = create(storing, tools=[TOOL], tool_choice="required", max_output_tokens=80, parallel_tool_calls=False)
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    second = create(storing, input=[result, {"role": "user", "content": "So?"}], previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"
    found = storing.get(f"{path}?order=asc", ALICE).json
    assert [item["type"] for item in found["data"]] == ["message", "function_call", "function_call_output", "message"]
    assert texts(found["data"]) == ["Hi", "So?"]
    assert found["data"][1] == call
    ids = [item["id"] for item in found["data"]]
    assert len(set(ids)) == 4
    assert (found["first_id"], found["last_id"], found["has_more"]) == (ids[0], ids[3], False)
    page = storing.get(f"{path}?limit=2&after={ids[3]}", ALICE).json
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after"), ("limit=1e9", "limit")):
        answer = storing.get(f"{path}?{query}", ALICE)
        assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_a_server_without_a_store_says_so(served: Caller) -> None:
    made = served.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "store": True}).json
    assert made["store"] is False
    answer = served.get(f"/v1/responses/{made['id']}")
    assert (answer.status, answer.json["error"]["message"]) == (
        404,
        "nothing is stored here: the server was started without --store",
    )
    for field in ({"previous_response_id": made["id"]}, {"background": True}):
        answer = served.post("/v1/responses", {"input": "Hi", **field})
        assert (answer.status, answer.json["error"]["param"]) == (400, next(iter(field)))
        assert "--store" in answer.json["error"]["message"]


def ended(caller: Caller, response_id: str, headers: dict[str, str] | None = None) -> Any:
    """Return a background response once it has ended."""
    path = f"/v1/responses/{response_id}"
    wait_for(lambda: caller.get(path, headers).json["status"] not in ("queued", "in_progress"))
    return caller.get(path, headers).json


def same(response: Any) -> Any:
    """Return what does not depend on when and how a response was asked for."""
    usage = {name: count for name, count in response["usage"].items() if name != "input_tokens_details"}
    own = {"id": "", "created_at": 0, "background": None, "store": None, "usage": usage}
    return {**response, **own, "output": texts(response["output"])}


def test_a_background_response_is_that_of_the_foreground(storing: Caller) -> None:
    wanted = create(storing, max_output_tokens=20, store=False)
    begun = create(storing, max_output_tokens=20, background=True)
    assert begun["background"] is True
    assert begun["status"] in ("queued", "in_progress")
    found = ended(storing, begun["id"], ALICE)
    assert found["background"] is True
    assert same(found) == same(wanted)
    answer = storing.get(f"/v1/responses/{begun['id']}?stream=true", ALICE)
    assert (answer.status, answer.json["error"]["param"]) == (400, "stream")
    later = create(storing, input="More", previous_response_id=begun["id"])
    assert later["previous_response_id"] == begun["id"]
    answer = storing.post("/v1/responses", {"input": "Hi", "background": True, "store": False}, ALICE)
    assert (answer.status, answer.json["error"]["param"]) == (400, "store")


def parts_of(answer: Answer) -> list[bytes]:
    return answer.body.split(b"\n\n")[:-1]


def test_a_background_stream_is_read_again_from_any_event(storing: Caller) -> None:
    body = {"input": "Hi", "max_output_tokens": 20, "seed": 5, "background": True, "stream": True}
    answer = storing.post("/v1/responses", body, ALICE)
    whole, last = parts_of(answer), events_of(answer)[-1]
    assert last["type"] == "response.incomplete"
    path = f"/v1/responses/{last['response']['id']}"
    assert storing.get(path, ALICE).json == last["response"]
    assert parts_of(storing.get(f"{path}?stream=true", ALICE)) == whole
    assert parts_of(storing.get(f"{path}?stream=true&starting_after=6", ALICE)) == whole[7:]
    assert storing.get(f"{path}?stream=true", BOB).status == 404
    assert storing.get(f"{path}?stream=true&starting_after=x", ALICE).status == 400


def test_a_background_response_is_cancelled(storing: Caller) -> None:
    begun = create(storing, max_output_tokens=3900, ignore_eos=True, background=True)
    path = f"/v1/responses/{begun['id']}"
    assert storing.post(f"{path}/cancel", {}, BOB).status == 404
    found = storing.post(f"{path}/cancel", {}, ALICE).json
    assert found["status"] == "cancelled"
    assert storing.get(path, ALICE).json == found == storing.post(f"{path}/cancel", {}, ALICE).json
    answer = storing.post("/v1/responses", {"input": "x", "previous_response_id": begun["id"]}, ALICE)
    assert (answer.status, answer.json["error"]["param"]) == (400, "previous_response_id")
    made = create(storing)
    assert storing.post(f"/v1/responses/{made['id']}/cancel", {}, ALICE).status == 400
    begun = create(storing, max_output_tokens=3900, ignore_eos=True, background=True)
    assert storing.call("DELETE", f"/v1/responses/{begun['id']}", None, ALICE).status == 200
    assert storing.get(f"/v1/responses/{begun['id']}", ALICE).status == 404


def test_a_full_store_is_an_error_and_no_empty_answer(storing: Caller) -> None:
    large = {"input": "Hi", "max_output_tokens": 4, "metadata": {"x": "y" * 150_000}}
    made: list[str] = []
    while (answer := storing.post("/v1/responses", large, ALICE)).status == 200:
        made.append(answer.json["id"])
        assert len(made) < 10
    assert (answer.status, answer.json["error"]["type"]) == (507, "InsufficientStorageError")
    assert "is full" in answer.json["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    answer = storing.post("/v1/responses", {**large, "stream": True}, ALICE)
    failed = answer.json["error"] if answer.status != 200 else events_of(answer)[-1]["error"]
    assert failed["type"] == "InsufficientStorageError"
    answer = storing.post("/v1/responses", {**large, "background": True}, ALICE)
    assert answer.status == 507
    assert storing.post("/v1/responses", {**large, "store": False}, ALICE).status == 200
    for one in made:
        assert storing.get(f"/v1/responses/{one}", ALICE).json["metadata"] == large["metadata"]
        assert storing.call("DELETE", f"/v1/responses/{one}", None, ALICE).status == 200
    create(storing)


def test_a_key_has_its_part_of_the_store(storing: Caller) -> None:
    large = {"input": "Hi", "max_output_tokens": 4, "metadata": {"x": "y" * 5000}}
    first = create(storing, CAROL, **large)
    for more in ({}, {"stream": True}):
        answer = storing.post("/v1/responses", {**large, **more}, CAROL)
        failed = answer.json["error"] if answer.status != 200 else events_of(answer)[-1]["error"]
        assert "this key has used its part of the store (9000 bytes)" in failed["message"]
    assert storing.post("/v1/responses", {**large, "background": True}, CAROL).status == 507
    create(storing, ALICE, **large)
    assert storing.call("DELETE", f"/v1/responses/{first['id']}", None, CAROL).status == 200
    create(storing, CAROL, **large)


BEGUN: dict[str, Any] = {"max_output_tokens": 250, "ignore_eos": True, "seed": 5, "background": True}
PATIENCE_S = 300  # of the soak: a server that was killed takes half a minute to come back on a loaded machine
SLOW = ("--executor-option", "step_us=4000")


def child_of(caller: Caller, package: bytes) -> int:
    """Return the id of a server's process that runs this package. Errors: StopIteration if there is none."""
    children = Path(f"/proc/{caller.process.pid}/task/{caller.process.pid}/children").read_text().split()
    words = b"-m\0%b%b\0" % (PREFIX.encode(), package)
    return next(int(pid) for pid in children if words in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_what_was_begun_goes_on_after_kills(tmp_path: Path) -> None:
    options = (*FAKE, *SLOW, *DEMO, "--store", str(tmp_path / "store.db"))
    with serving(*options) as caller:
        wanted = create(caller, {}, **BEGUN | {"background": False})
        first = create(caller, {}, input="Earlier", max_output_tokens=4)
        begun = [create(caller, {}, **BEGUN) for _ in range(3)]
        continued = create(caller, {}, previous_response_id=first["id"], **BEGUN)
        streamed, events = begin_stream(caller, 20)
        os.kill(child_of(caller, b"frontend.http"), signal.SIGKILL)
        found = [ended(caller, one["id"]) for one in begun]
    assert [same(one) for one in found] == [same(wanted)] * 3
    unfinished = begin_and_kill(*options)
    with serving(*options) as caller:
        assert caller.get(f"/v1/responses/{unfinished['id']}").json["status"] in ("queued", "in_progress")
        assert len(texts(ended(caller, unfinished["id"])["output"])) == 1
        assert caller.get(f"/v1/responses/{first['id']}").json == first
        assert ended(caller, continued["id"])["previous_response_id"] == first["id"]
        last = ended(caller, streamed)
        assert same(last) == same(wanted)
        path = f"/v1/responses/{streamed}?stream=true"
        whole = parts_of(caller.get(path))
        assert whole[: len(events)] == events
        assert parts_of(caller.get(f"{path}&starting_after={len(events) - 1}")) == whole[len(events) :]


def begin_and_kill(*options: str) -> Any:
    """Begin a background response, and kill the server and its HTTP process; return the response."""
    found = None
    with contextlib.suppress(AssertionError), serving(*options) as caller:  # of its exit status
        found = create(caller, {}, **BEGUN | {"max_output_tokens": 300})
        worker = child_of(caller, b"frontend.http")
        caller.process.kill()
        with contextlib.suppress(ProcessLookupError):  # it ends by itself too
            os.kill(worker, signal.SIGKILL)
    assert found is not None
    return found


def begin_stream(caller: Caller, count: int) -> tuple[str, list[bytes]]:
    """Begin a background stream and read some of its events; return its id and them."""
    body = json.dumps({"input": "Hi", "stream": True, **BEGUN}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    read = b""
    with caller.socket() as peer:
        peer.sendall(head + body)
        while read.count(b"event: ") <= count + 4:
            read += peer.recv(65_536)
    events = [b"event: " + one.split(b"\n\n")[0] for one in read.split(b"event: ")[1:]][:count]
    return json.loads(events[0].split(b"\ndata: ")[1])["response"]["id"], events


@pytest.mark.soak
def test_nothing_is_lost_doubled_or_different_under_random_kills(tmp_path: Path) -> None:
    """Each round begins responses, kills the HTTP process or the first engine, and continues what it has."""
    draw = random.Random(7)
    options = (*FAKE, "--executor-option", "step_us=1000", *DEMO, "--store", str(tmp_path / "store.db"))
    with serving(*options) as caller:
        wanted = create(caller, {}, **BEGUN | {"background": False})
        follow = {"input": "And?", "max_output_tokens": 20, "seed": 3}
        continued = create(caller, {}, previous_response_id=wanted["id"], **follow)
        known: list[str] = []
        for _ in range(60):
            known += [retried(caller, **BEGUN)["id"] for _ in range(3)]
            time.sleep(draw.uniform(0, 0.3))
            with contextlib.suppress(ProcessLookupError, StopIteration):
                os.kill(child_of(caller, draw.choice([b"frontend.http", b"core"])), signal.SIGKILL)
            if draw.random() < 0.3:
                answer = retried(caller, previous_response_id=draw.choice(known[:-3] or [wanted["id"]]), **follow)
                assert texts(answer["output"]) == texts(continued["output"])
        assert len(set(known)) == 180
        for one in known:
            assert same(retried_end(caller, one)) == same(wanted)


def retried(caller: Caller, **fields: Any) -> Any:
    """Return a response, asked for until a server that lives answers and its history has ended."""
    end, message = time.monotonic() + PATIENCE_S, ""
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = caller.post("/v1/responses", {"input": "Hi", "max_output_tokens": 8, **fields})
            if answer.status == 200:
                return answer.json
            message = answer.json["error"]["message"]
            assert answer.status == 503 or "is in_progress: only one that has its answer" in message, answer.body
        assert time.monotonic() < end, message
        time.sleep(0.05)


def retried_end(caller: Caller, response_id: str) -> Any:
    """Return a response that has ended, asked for until a server that lives answers."""
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = caller.get(f"/v1/responses/{response_id}")
            assert answer.status == 200, answer.body
            if answer.json["status"] not in ("queued", "in_progress"):
                return answer.json
        assert time.monotonic() < end
        time.sleep(0.05)
