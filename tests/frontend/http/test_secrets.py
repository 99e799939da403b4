"""Canaries: what callers send and hold is in no log, no argument, no environment and no page that outlives it."""

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.http.callers.keys import digest_of
from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Caller, serving
from tests.preloaded.start import EXEC

CANARY, KEY, SALT = "canary-in-a-prompt", "canary-in-a-key", "canary-in-a-salt"
FAKE = (
    "--executor",
    "fake",
    "--executor-option",
    "vocab_size=49152",
    "--executor-option",
    "max_model_len=4096",
    "--log-requests",
)
POISON = 777


def wrong_and_right_calls(caller: Caller) -> list[int]:
    """Calls of many kinds, each with a canary in what it says; return the statuses."""
    headers = {"authorization": f"Bearer {KEY}"}
    messages = [{"role": "user", "content": CANARY}]
    bodies: list[Any] = [
        {"messages": messages, "max_tokens": 4, "cache_salt": SALT},
        {"messages": messages, "max_tokens": CANARY},
        {"messages": messages, "max_tokens": 4, "stop": [CANARY], "unknown": CANARY},
        {"messages": [{"role": CANARY, "content": CANARY}]},
        {
            "messages": messages,
            "response_format": {"type": "json_schema", "json_schema": {"name": CANARY, "schema": 3}},
        },
        json.dumps({"messages": messages}).encode()[:-3],
    ]
    statuses = [caller.post("/v1/chat/completions", body, headers).status for body in bodies]
    statuses.append(caller.post("/v1/completions", {"prompt": [POISON, 5], "max_tokens": 8}, headers).status)
    return [*statuses, caller.chat(CANARY).status, caller.get(f"/{CANARY}", headers).status]


def descendants(pid: int) -> list[int]:
    children = [int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


def test_no_canary_is_found_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {digest_of(KEY)}\n")
    poison = ("--executor-option", f"poison=raise:{POISON}:4", "--access-log", "--api-key-file", str(keys))
    found: list[str] = []
    monkeypatch.setenv(EXEC, "1")  # its environment is looked at
    with serving(*FAKE, *poison, "-m", str(resolve_model(None))) as caller:
        assert caller.process.stderr is not None
        reader = threading.Thread(target=found.extend, args=(caller.process.stderr,))
        reader.start()
        statuses = wrong_and_right_calls(caller)
        assert statuses[0] == 200
        assert {401, 404, 422} <= set(statuses)  # 422: the poison's
        client = EngineClient(ZmqTransport(caller.connect))
        assert client.welcome.epoch >= 1, "the poison has killed an engine, whose last words are in the log"
        os.kill(client.welcome.pid, signal.SIGUSR1)  # prints the stacks
        client.close()
        pids = [caller.process.pid, *descendants(caller.process.pid)]
        assert len(pids) >= 3  # and those that write flight recorders' files
        for pid in pids:
            folder = Path("/proc", str(pid))
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a writer that has ended since
                found += [(folder / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ")]
    reader.join()
    text = "\n".join(found)
    assert "poison" in text, "the log is there"
    assert "route=" in text
    assert [line for line in text.splitlines() if any(canary in line for canary in (CANARY, KEY, SALT))] == []
