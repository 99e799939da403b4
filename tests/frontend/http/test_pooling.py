"""Pooling requests over HTTP are bounded before they cost anything, and end when their callers have left."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from frontend.http import pooling
from frontend.http.bodies import ChatBody
from frontend.http.chat_request import with_fetched
from frontend.http.errors import HttpError
from frontend.http.holdings import MAX_BYTES, Holdings
from frontend.http.openai import scores
from frontend.http.pooling import PoolingCall
from ipc.params.pooling_params import PoolingParams

CALL = PoolingCall(PoolingParams(), "embed")
IMAGE: Any = {"prompt": "<image>", "multi_modal_data": {"image": [b""]}}
WIDTH = 8


def request_of(exchange: object, **more: Any) -> Any:
    fields = {"key": None, "adapter": None, "lease": None, "deadline_s": lambda: None, "num_stored_bytes": 0}
    return SimpleNamespace(**{"exchange": exchange, **fields, **more})


def service_of(run: Callable[..., Any], max_bytes: int = 1 << 40, **more: Any) -> Any:
    tasks = {"embed": WIDTH, "token_embed": WIDTH, "classify": 1}
    welcome = SimpleNamespace(features=SimpleNamespace(max_bytes=max_bytes), tasks=tasks)
    engine = SimpleNamespace(client=SimpleNamespace(welcome=welcome))
    return SimpleNamespace(**{"engine": engine, "run": run, "holdings": Holdings(), **more})


class Present:
    has_left, on_left = False, None


async def here(request: Any, work: Any, *, is_long: bool) -> Any:
    return work()


def reads_squares(size: int, turns: list[int]) -> Callable[..., list[Any]]:
    """Return prepare_pooling() for images of one square. turns: the prompts that were read together."""

    def read(engine: Any, prompts: Sequence[Any], *rest: Any, **more: Any) -> list[Any]:
        turns.append(len(prompts))
        square = SimpleNamespace(feature=SimpleNamespace(data=range(size)))
        of_each = [(square,) if isinstance(prompt, Mapping) else () for prompt in prompts]
        return [SimpleNamespace(prompt=SimpleNamespace(features=features)) for features in of_each]

    return read


@pytest.mark.parametrize(("max_bytes", "leaves_after", "status"), [(100, 9, 400), (1000, 2, 499), (1000, -1, 499)])
def test_images_of_a_request_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch, max_bytes: int, leaves_after: int, status: int
) -> None:
    """Each image is read in a turn of its own, and none after the bound or after the caller has left."""
    turns: list[int] = []

    class Exchange:
        @property
        def has_left(self) -> bool:
            return len(turns) > leaves_after

    monkeypatch.setattr(pooling, "prepare_pooling", reads_squares(60, turns))
    service, prompts = service_of(here, max_bytes), ["a", "b", IMAGE, IMAGE, IMAGE, "c"]
    with contextlib.ExitStack() as held, pytest.raises(HttpError) as refused:
        asyncio.run(pooling.prepare(service, request_of(Exchange()), prompts, CALL, held))
    assert (refused.value.status, turns) == (status, [2, 1, 1] if leaves_after > 0 else [])
    service.holdings.take(MAX_BYTES)  # nothing is counted any more


def test_squares_count_while_others_of_the_request_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests have their turns in between. A request that is alone may take more than there is; then no image of
    others is read.
    """
    turns: list[int] = []
    monkeypatch.setattr(pooling, "prepare_pooling", reads_squares(MAX_BYTES * 3 // 4, turns))
    service = service_of(here)
    with contextlib.ExitStack() as held:
        asyncio.run(pooling.prepare(service, request_of(Present()), [IMAGE, IMAGE], CALL, held))
        with contextlib.ExitStack() as others, pytest.raises(HttpError) as refused:
            asyncio.run(pooling.prepare(service, request_of(Present()), [IMAGE, IMAGE], CALL, others))
        assert (refused.value.status, turns) == (503, [1, 1])
    service.holdings.take(MAX_BYTES)


@pytest.mark.parametrize(
    ("task", "num_prompts", "status"), [("embed", 2, 504), ("token_embed", 1, 504), ("token_embed", 2, 400)]
)
def test_vectors_of_tokens_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch, task: Any, num_prompts: int, status: int
) -> None:
    """The engine bounds those of one prompt only."""
    submitted: list[object] = []

    def submit(engine: object, one: object) -> Any:
        with pytest.raises(HttpError) as refused:
            service.holdings.take(MAX_BYTES)
        assert refused.value.status == 503
        submitted.append(one)
        raise HttpError(504, "enough")

    monkeypatch.setattr(pooling, "submit_pooling", submit)
    service = service_of(here, pump=SimpleNamespace(forget=lambda numbers: None))
    service.engine.client.discard = lambda numbers: None
    prompt = SimpleNamespace(token_ids=range(MAX_BYTES // (WIDTH * 4 * 14)), features=())  # over half of it as text
    prepared: Any = [SimpleNamespace(prompt=prompt, params=PoolingParams())] * num_prompts
    with pytest.raises(HttpError) as refused:
        asyncio.run(pooling.answer(service, request_of(Present()), prepared, task))
    assert (refused.value.status, len(submitted)) == (status, int(status == 504))
    service.holdings.take(MAX_BYTES)


@pytest.mark.parametrize("leaves", ["before", "while they are fetched", "never"])
def test_images_are_fetched_while_their_caller_waits(leaves: str) -> None:
    steps: list[str] = []

    class Media:
        @contextlib.asynccontextmanager
        async def fetched(self, urls: list[str], tenant: str) -> AsyncIterator[dict[str, bytes]]:
            steps.append("begun")
            try:
                if leaves != "never":
                    exchange.has_left = True
                    assert exchange.on_left is not None
                    exchange.on_left()
                    await asyncio.sleep(60)
                yield dict.fromkeys(urls, b"file")
            finally:
                steps.append("ended")

    async def fetch() -> Any:
        async with with_fetched(service, request_of(exchange), [chat]):
            return chat.messages[0]["content"][0]

    exchange: Any = SimpleNamespace(has_left=leaves == "before", on_left=None)
    service = service_of(here, shared=SimpleNamespace(media=Media()))
    service.engine.images = object()
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    chat = ChatBody(messages=[{"role": "user", "content": [part]}])
    if leaves == "never":
        assert asyncio.run(fetch()) == {"type": "image", "image": b"file"}
    else:
        with pytest.raises(HttpError) as refused:
            asyncio.run(fetch())
        assert refused.value.status == 499
    assert steps == ([] if leaves == "before" else ["begun", "ended"])
    assert exchange.on_left is None
    assert chat.messages[0]["content"] == [part]


def test_nothing_is_fetched_for_a_key_without_tokens() -> None:
    class Lease:
        def check_tokens(self, num_tokens: int) -> None:
            raise HttpError(429, f"no {num_tokens} left")

    async def fetch() -> None:
        async with with_fetched(service, request_of(Present(), lease=Lease()), [chat]):
            pass

    service = service_of(here, shared=SimpleNamespace(media=object()))
    service.engine.images = object()
    chat = ChatBody(messages=[{"role": "user", "content": [{"type": "image", "url": "https://example.com/a.png"}]}])
    with pytest.raises(HttpError, match="no 1 left"):
        asyncio.run(fetch())


@pytest.mark.parametrize("body", [{}, {"truncate_prompt_tokens": 5}])
def test_pairs_are_bounded_before_they_are_read(body: dict[str, Any]) -> None:
    """A query is tokenized with each of the texts, so a short body may be much text."""
    checked: list[str] = []
    options, standing = SimpleNamespace(max_body_bytes=1000), SimpleNamespace(refuse_requests=lambda: None)
    service = service_of(here, options=options, standing=standing, check_model=lambda request, name: "model")
    service.check_prompts = lambda *_, **options: None
    service.check_text, service.check_countable = (checked.append, lambda _: pytest.fail("refused if cut"))
    if not body:
        service.check_text, service.check_countable = service.check_countable, checked.append
    data = msgspec.json.encode({"query": "q" * 200, "documents": ["a", "b", "c", "d", "e"], **body})
    request = request_of(Present(), decode=lambda decoder: decoder.decode(data))
    with pytest.raises(HttpError, match="the pairs have 1005 characters, the query in each of them; at most 1000"):
        asyncio.run(scores.rerank(service, request))
    assert sorted(checked) == ["a", "b", "c", "d", "e", "q" * 200]
