"""Conversations: their items, the responses that are made in them, and prompts that are cut to fit."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.http.callers.keys import digest_of
from tests.frontend.http.caller import Caller, serving, wait_for
from tests.frontend.http.conftest import FAKE
from tests.frontend.http.stored.test_batches import ALICE, BOB, KEYS
from tests.frontend.http.stored.test_responses import (
    BEGUN,
    DEMO,
    SLOW,
    child_of,
    create,
    ended,
    retried,
    retried_end,
    texts,
)

HI = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = tmp_path_factory.mktemp("store")
    lines = [f"{name} {digest_of(key)}" for name, key in KEYS.items()]
    (folder / "keys").write_text("\n".join(lines))
    options = ("--store", str(folder / "store.db"), "--api-key-file", str(folder / "keys"))
    with serving(*FAKE, *DEMO, *options) as caller:
        yield caller


def begun(caller: Caller, headers: dict[str, str] = ALICE, **fields: Any) -> Any:
    answer = caller.post("/v1/conversations", fields, headers)
    assert answer.status == 200, answer.body
    return answer.json


def items_in(caller: Caller, conversation: Any, headers: dict[str, str] = ALICE) -> list[Any]:
    found = caller.get(f"/v1/conversations/{conversation['id']}/items?order=asc&limit=100", headers)
    assert found.status == 200, found.body
    return found.json["data"]


def test_a_conversation_is_a_list_of_items(storing: Caller) -> None:
    made = begun(storing, items=[HI], metadata={"topic": "tests"})
    path = f"/v1/conversations/{made['id']}"
    assert (made["object"], made["metadata"]) == ("conversation", {"topic": "tests"})
    assert storing.get(path, ALICE).json == made
    updated = storing.post(path, {"metadata": {"topic": "more"}}, ALICE).json
    assert updated == {**made, "metadata": {"topic": "more"}} == storing.get(path, ALICE).json
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}
    added = storing.post(f"{path}/items", {"items": [answer, HI]}, ALICE).json
    assert ([one["role"] for one in added["data"]], added["has_more"]) == (["assistant", "user"], False)
    items = items_in(storing, made)
    assert items[1:] == added["data"]
    assert texts(items) == ["Hi", "Hello", "Hi"]
    assert len({one["id"] for one in items}) == 3
    again = storing.post(f"{path}/items", {"items": [items[0]]}, ALICE)  # with an id that is there
    assert again.status == 200
    assert len({one["id"] for one in items_in(storing, made)}) == 4
    page = storing.get(f"{path}/items?limit=1&after={items[2]['id']}", ALICE).json
    assert (page["data"], page["has_more"]) == ([items[1]], True)
    one = f"{path}/items/{items[1]['id']}"
    assert storing.get(one, ALICE).json == items[1]
    for answer_of in (storing.get(path, BOB), storing.get(one, BOB), storing.call("DELETE", one, None, BOB)):
        assert (answer_of.status, "no conversation" in answer_of.json["error"]["message"]) == (404, True)
    assert storing.call("DELETE", one, None, ALICE).json == updated
    assert storing.get(one, ALICE).status == storing.call("DELETE", one, None, ALICE).status == 404
    assert storing.get(f"{path}/items/a/b", ALICE).status == 404
    assert storing.call("DELETE", path, None, ALICE).json["deleted"] is True
    assert storing.get(path, ALICE).status == 404


def test_wrong_conversations_are_refused_by_name(storing: Caller) -> None:
    for body, param in (
        ({"items": [{"type": "item_reference"}]}, "input"),
        ({"items": [HI] * 21}, "items"),
        ({"metadata": {"x": 5}}, "metadata"),
        ({"items": [{**HI, "x": [[]] * 70_000}]}, None),
    ):
        answer = storing.post("/v1/conversations", body, ALICE)
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
    made = begun(storing)
    assert storing.post(f"/v1/conversations/{made['id']}", {"items": []}, ALICE).status == 400
    body = {"input": "Hi", "conversation": made["id"]}
    for more, param in (
        ({"previous_response_id": "resp_x"}, "conversation"),
        ({"store": False}, "store"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"conversation": "conv_x"}, "conversation"),
    ):
        answer = storing.post("/v1/responses", {**body, **more}, ALICE)
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
    answer = storing.post("/v1/responses", body, BOB)
    assert (answer.status, answer.json["error"]["code"]) == (400, "conversation_not_found")
    assert items_in(storing, made) == []


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}])
def test_a_response_continues_its_conversation(storing: Caller, more: Any) -> None:
    made = begun(storing, items=[{"role": "system", "content": "Be brief."}])
    first = create(storing, conversation=made["id"])
    assert first["conversation"] == {"id": made["id"]}
    second = create(storing, conversation={"id": made["id"]}, input="And now?", **more)
    if "background" in more:
        second = ended(storing, second["id"], ALICE)
    found = items_in(storing, made)
    assert found[2] == first["output"][0]
    assert found[4] == second["output"][0]
    assert texts(found) == ["Be brief.", "Hi", *texts(first["output"]), "And now?", *texts(second["output"])]
    whole = create(storing, input=[*found[:3], {"role": "user", "content": "And now?"}], store=False)
    assert texts(whole["output"]) == texts(second["output"])
    assert whole["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert storing.get(f"/v1/responses/{second['id']}", ALICE).json["conversation"] == {"id": made["id"]}


def test_a_response_that_has_no_answer_adds_nothing(storing: Caller) -> None:
    made = begun(storing)
    response = create(storing, conversation=made["id"], max_output_tokens=3900, ignore_eos=True, background=True)
    assert storing.post(f"/v1/responses/{response['id']}/cancel", {}, ALICE).json["status"] == "cancelled"
    assert items_in(storing, made) == []
    response = create(storing, conversation=made["id"], max_output_tokens=200, ignore_eos=True, background=True)
    assert storing.call("DELETE", f"/v1/conversations/{made['id']}", None, ALICE).status == 200
    assert ended(storing, response["id"], ALICE)["status"] == "incomplete"  # and its items are nowhere


def test_a_conversation_is_the_same_after_a_kill(tmp_path: Path) -> None:
    with serving(*FAKE, *SLOW, *DEMO, "--store", str(tmp_path / "store.db")) as caller:
        wanted = create(caller, {}, **BEGUN | {"background": False})
        made = begun(caller, {})
        first = create(caller, {}, conversation=made["id"], **BEGUN)
        assert caller.post(f"/v1/conversations/{made['id']}/items", {"items": [HI]}).status == 200
        os.kill(child_of(caller, b"frontend.http"), signal.SIGKILL)

        def is_back() -> bool:
            with contextlib.suppress(OSError):
                return caller.get("/live").status == 200
            return False

        wait_for(is_back, 60)
        found = ended(caller, first["id"])
        assert texts(found["output"]) == texts(wanted["output"])
        assert texts(items_in(caller, made, {})) == ["Hi", "Hi", *texts(wanted["output"])]


@pytest.mark.soak
def test_no_turn_is_lost_doubled_or_different_under_random_kills(tmp_path: Path) -> None:
    """Each round adds a turn to some conversations, and kills the HTTP process or the first engine during that."""
    draw = random.Random(5)
    options = (*FAKE, "--executor-option", "step_us=1000", *DEMO, "--store", str(tmp_path / "store.db"))
    with serving(*options) as caller:
        made = [begun(caller, {}) for _ in range(20)]
        known: dict[str, list[str]] = {one["id"]: [] for one in made}
        for _ in range(25):
            turns = {}
            for one in draw.sample(made, 4):
                fields = {"max_output_tokens": 30, "ignore_eos": True, "seed": 5, "background": True}
                turns[one["id"]] = retried(caller, conversation=one["id"], **fields)["id"]
            time.sleep(draw.uniform(0, 0.2))
            with contextlib.suppress(ProcessLookupError, StopIteration):
                os.kill(child_of(caller, draw.choice([b"frontend.http", b"core"])), signal.SIGKILL)
            for name, response_id in turns.items():
                known[name] += [item["id"] for item in retried_end(caller, response_id)["output"]]
        num_compared = 0
        for one in made:
            items = items_in(caller, one, {})
            assert [item["role"] for item in items] == ["user", "assistant"] * (len(items) // 2)
            ids = [item["id"] for item in items]
            assert {name: ids.count(name) for name in known[one["id"]]} == dict.fromkeys(known[one["id"]], 1)
            if len(items) > 2 * len(
                known[one["id"]]
            ):  # a request that was cut off has made a turn next to its repetition
                continue
            num_compared += 1
            for at in range(1, len(items), 2):
                again = create(caller, {}, input=items[:at], max_output_tokens=30, ignore_eos=True, store=False)
                assert texts(again["output"]) == texts(items[at : at + 1])
        assert num_compared > 5


def test_a_prompt_that_is_too_long_is_cut_at_its_beginning(storing: Caller) -> None:
    long = [{"role": "user", "content": f"{number} " + "word " * 1200} for number in range(5)]
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
    items = [long[0], call, long[1], result, *long[2:]]
    answer = storing.post("/v1/responses", {"input": items, "max_output_tokens": 8}, ALICE)
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    cut = create(storing, input=items, truncation="auto")
    assert cut["truncation"] == "auto"
    same = create(storing, input=long[2:], store=False)  # the result goes with its call
    assert texts(cut["output"]) == texts(same["output"])
    assert cut["usage"]["input_tokens"] == same["usage"]["input_tokens"]
    later = create(storing, input="And?", truncation="auto", previous_response_id=cut["id"])
    assert later["usage"]["input_tokens"] < 4096
    assert len(storing.get(f"/v1/responses/{later['id']}/input_items?limit=100", ALICE).json["data"]) == 9
    body = {"input": long[0]["content"] * 5, "truncation": "auto"}
    answer = storing.post("/v1/responses", body, ALICE)
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    answer = storing.post("/v1/responses", {**body, "truncation": "middle"}, ALICE)
    assert (answer.status, answer.json["error"]["param"]) == (400, "truncation")
