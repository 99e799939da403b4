"""Images of chats count as squares from when they are made until their answers end, in the memory of all answers."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from frontend.http import holdings
from frontend.http.app import App
from frontend.http.errors import HttpError
from frontend.http.process.options import HttpOptions
from frontend.http.service import Service
from frontend.http.shared import Shared
from frontend.http.stored.database import MIN_STORE_BYTES, Database
from frontend.http.wire.local_caller import LocalCaller
from frontend.http.wire.server import open_engine
from ipc.options.given_options import config_from_options
from tests.core.models.idefics3_checkpoint import SQUARE, noise, write_checkpoint
from tests.frontend.test_images import url_of

pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

#: An image of nine squares, and one of all of it.
URL = url_of(noise(3 * SQUARE, 3 * SQUARE, 1))
NUM_BYTES = 10 * SQUARE * SQUARE * 3
BROKEN = "data:image/png;base64,AAAA"
TEXT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
PATIENCE_S = 20.0


def of_openai(url: str = URL, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, **fields}


def of_anthropic() -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    return {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
        "max_tokens": 4,
    }


def of_ollama() -> dict[str, Any]:
    message = {"role": "user", "content": "What?", "images": [URL.partition(",")[2]]}
    return {"model": "m", "messages": [message], "stream": False, "options": {"num_predict": 4}}


def of_responses(**fields: Any) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": URL}]
    return {"input": [{"role": "user", "content": parts}], "max_output_tokens": 16, **fields}


class Engine(NamedTuple):
    """An engine's address, and a client that may stop its steps."""

    address: str
    owner: EngineClient


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = str(write_checkpoint(tmp_path_factory.mktemp("idefics3")))
    with EngineProcess(config_from_options(model=model, dtype="float32", threads=1, max_model_len=700)) as process:
        owner = EngineClient(ZmqTransport(process.address), owner_token=process.owner_token)
        yield Engine(process.address, owner)
        owner.close()


class Site:
    """A server in this process, and a caller."""

    def __init__(self, address: str, folder: Path, kind: type[Service] = Service) -> None:
        options = HttpOptions(checks_host=False, served_model_names=("m",))
        self.engine = open_engine(address)
        self.shared = Shared(options, Database(str(folder / "store"), MIN_STORE_BYTES, 0))
        self.service = kind(self.engine, options, self.shared)
        self._caller = LocalCaller(App(self.service))

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        async with asyncio.timeout(PATIENCE_S):
            answer = await self._caller.post(path, json.dumps(body).encode())
        return answer.status, answer.body.decode()

    @property
    def is_free(self) -> bool:
        """Whether no memory is taken."""
        try:
            self.service.holdings.check(1 << 60)
        except HttpError:
            return False
        return True

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.002)

    def close(self) -> None:
        self.service.close()
        self.shared.close()
        self.engine.close()


CHATS = {
    "chat": ("/v1/chat/completions", of_openai()),
    "messages": ("/v1/messages", of_anthropic()),
    "ollama": ("/api/chat", of_ollama()),
    "responses": ("/v1/responses", of_responses()),
    "background": ("/v1/responses", of_responses(background=True)),
}


@pytest.mark.parametrize("chat", CHATS)
def test_squares_count_until_the_answer_ends(
    engine: Engine, chat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat that is alone may take more than there is. Meanwhile no other begins, and no other's image is read."""
    monkeypatch.setattr(holdings, "MAX_BYTES", NUM_BYTES)

    async def run() -> None:
        site = Site(engine.address, tmp_path)
        try:
            engine.owner.pause()
            first = asyncio.ensure_future(site.post(*CHATS[chat]))
            await site.until(lambda: not site.is_free)
            for body in (TEXT, of_openai(), of_openai(BROKEN)):
                status, text = await site.post("/v1/chat/completions", body)
                assert (status, "unfinished answers take all the memory" in text) == (503, True)
            engine.owner.resume()
            assert (await first)[0] == 200
            await site.until(lambda: site.is_free)
            assert (await site.post("/v1/chat/completions", TEXT))[0] == 200
        finally:
            engine.owner.resume()
            site.close()

    asyncio.run(run())


class Refusing(Service):
    """A server that submits nothing. held: the bytes of prompts then."""

    held = 0

    async def submit(self, request: Any, prepared: Any, answer: Any) -> Any:
        self.held = request.held.num_bytes
        raise HttpError(503, "enough")


@pytest.mark.parametrize("chat", CHATS)
def test_squares_of_what_is_not_submitted_are_given_back(engine: Engine, chat: str, tmp_path: Path) -> None:
    async def run() -> None:
        site = Site(engine.address, tmp_path, Refusing)
        try:
            status, text = await site.post(*CHATS[chat])
            assert (status, "enough" in text) == (503, True)
            assert isinstance(site.service, Refusing)
            assert site.service.held == NUM_BYTES
            assert site.is_free
        finally:
            site.close()

    asyncio.run(run())


def test_squares_of_what_is_refused_are_given_back(engine: Engine, tmp_path: Path) -> None:
    async def run() -> None:
        site = Site(engine.address, tmp_path)
        try:
            for body, why in (
                (of_openai(BROKEN), "image"),
                (of_openai(n=60, logprobs=True, top_logprobs=20, max_tokens=600), "log probabilities"),
            ):
                status, text = await site.post("/v1/chat/completions", body)
                assert (status, why in text) == (400, True), text
                assert site.is_free
        finally:
            site.close()

    asyncio.run(run())
