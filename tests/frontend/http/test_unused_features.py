"""What a plain chat pays for features that it does not use: counted calls, in a process that has them."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from frontend.engine.process import EngineProcess
from frontend.http.app import App
from frontend.http.process.options import HttpOptions
from frontend.http.service import Service
from frontend.http.shared import Shared
from frontend.http.stored.database import MIN_STORE_BYTES, Database
from frontend.http.wire.local_caller import LocalCaller
from frontend.http.wire.server import open_engine
from ipc.files.model_files import resolve_model
from ipc.options.given_options import config_from_options
from tests.fake_options import fake_options

#: Folders and files of features.
FEATURES = (
    "/frontend/http/stored/",
    "/frontend/http/many/",
    "/frontend/http/pins.py",
    "/frontend/http/replies/receipts.py",
)
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    options: dict[str, Any] = {"model": str(resolve_model(None)), "executor": "fake", "max_num_seqs": 4}
    options["executor_options"] = fake_options(vocab_size=49152, max_model_len=512)
    with EngineProcess(config_from_options(**options)) as process:
        yield process.address


async def count(app: App, **fields: Any) -> Counter[str]:
    """The calls of features' functions, by name, while a chat is answered; "others" is all other calls."""
    caller, found = LocalCaller(app), Counter[str]()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            is_features = any(part in frame.f_code.co_filename for part in FEATURES)
            found[frame.f_code.co_qualname if is_features else "others"] += 1

    for counts in (False, True):
        sys.setprofile(profile if counts else None)
        try:
            answer = await caller.post("/v1/chat/completions", json.dumps({**BODY, **fields}).encode())
        finally:
            sys.setprofile(None)
        assert answer.status == 200, answer.body
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stores", [False, True])
def test_a_plain_chat_makes_one_call_for_them(address: str, tmp_path: Path, stores: bool, stream: bool) -> None:
    """It asks for pins once, whatever the number of its tokens; of responses, batches and receipts it knows nothing."""

    async def run() -> None:
        engine, options = open_engine(address), HttpOptions()
        shared = Shared(options, Database(str(tmp_path / "store"), MIN_STORE_BYTES, 0) if stores else None)
        service = Service(engine, options, shared)
        try:
            calls = await count(App(service), stream=stream)
            assert calls.pop("others") > 100
            assert calls == {"pins_of": 1}
            calls = await count(App(service), stream=stream, receipt=True)
            assert calls["Receipts.of"] == 1, "one that uses a feature is seen"
        finally:
            service.close()
            shared.close()
            engine.close()

    asyncio.run(run())
