"""ModelHost: a model that is being changed does not begin to load."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from frontend.http.many.catalog import Catalog, Entry, entry_of
from frontend.http.many.changes import Changes
from frontend.http.many.host import ModelHost
from frontend.http.many.link import HostLink
from frontend.http.many.messages import Begin, Card, Ended, News

NAME = "one"


def no_engine(entry: Entry, card: Card) -> None:
    raise AssertionError(f"{entry.name} was loaded while it was being deleted")


async def delete_and_begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[News]:
    """Return the news after a request for a model that is being deleted."""
    card = Card(name=NAME, num_bytes=1)
    may_go_on, has_begun = threading.Event(), threading.Event()
    catalog = Catalog([entry_of(NAME, {"executor": "fake"})])
    host = ModelHost(catalog, 10, card_of=lambda _: card, make_engine=no_engine, on_news=lambda _: None)  # type: ignore[arg-type]
    make = Changes.make

    def slowly(*arguments: Any) -> None:
        has_begun.set()
        assert may_go_on.wait(30)
        make(*arguments)

    monkeypatch.setattr(Changes, "make", slowly)
    await host.listen(str(folder / "host.sock"))
    link, news = await HostLink.open(str(folder / "host.sock")), list[News]()
    has_ended = asyncio.Event()

    def on_message(message: News) -> None:
        news.append(message)
        if isinstance(message, Ended):
            has_ended.set()

    link.on_message = on_message
    link.start()

    async def delete() -> None:
        async for step in link.change("delete", NAME):
            assert not step.error, step.error

    async with asyncio.timeout(30):
        deletion = asyncio.create_task(delete())
        await asyncio.to_thread(has_begun.wait)
        link.send(Begin(NAME))
        again = [step async for step in link.change("delete", NAME)]  # answered after the host has read Begin
        assert "being changed already" in again[-1].error
        may_go_on.set()
        await deletion
        await has_ended.wait()
    link.close()
    await host.close()
    return news


def test_a_model_that_is_being_deleted_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, ended = asyncio.run(delete_and_begin(tmp_path, monkeypatch))
    assert known.cards == (), "the list without it comes first"  # type: ignore[union-attr]
    assert ended == Ended(NAME, f"there is no model {NAME!r}")
