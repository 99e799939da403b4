"""ManyModels: the HTTP worker's side of many models. It finds a request's model, and waits until that is loaded."""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from urllib.parse import parse_qs

import msgspec

from frontend.http.errors import HttpError, retry_after
from frontend.http.many.link import HostLink
from frontend.http.many.messages import Begin, Card, End, Ended, Known, News, Ready
from frontend.http.many.residents import Admit, Place, Refuse, Residents, Start, Stop
from frontend.http.many.waiting import Asked, read_asked, wait_for_model
from frontend.http.request import Request
from frontend.http.service import MODEL_NOT_FOUND, Service
from frontend.http.shared import Shared
from frontend.http.wire.server import open_engine
from frontend.session import EngineHandle
from frontend.text.known_tokenizers import KnownTokenizers
from ipc.errors import EngineCoreError

MAX_WAIT_S = 900.0
_TICK_S = 0.5
_TAG = ":latest"
_FINAL = [(b"x-should-retry", b"false")]
_log = logging.getLogger("engine_core.http")


class ManyModels:
    """See the module's docstring. Created in the event loop that it runs in."""

    def __init__(self, shared: Shared, link: HostLink) -> None:
        self.shared, self.link = shared, link
        self.description = b""
        self.standing = self
        self.cards: dict[str, Card] = {}
        self.residents = Residents(link.known.memory, MAX_WAIT_S)
        self._services: dict[str, Service] = {}
        self._failures: dict[str, str] = {}  # model -> why there is no session with its engine, which ends
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokenizers = KnownTokenizers()
        self._loop = asyncio.get_running_loop()
        link.on_message = self._on_message
        self._on_message(link.known)
        for name, address in link.known.running.items():
            self.residents.restore(name)
            if address:
                self._open(name, address)
        link.start()
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    @property
    def services(self) -> Sequence[Service]:
        """Return the services of all models that are loaded."""
        return list(self._services.values())

    def refuse_requests(self) -> None:
        """Do nothing while new requests are accepted. Errors: HttpError 503."""
        if self.shared.is_draining:
            raise HttpError(503, "the server is shutting down", headers=retry_after(1000))

    refuse_probe = refuse_requests

    def close(self) -> None:
        """Stop background work, and close the sessions. The engines continue."""
        self._timer.cancel()
        self.link.close()
        for task in self._tasks:
            task.cancel()
        for name in list(self._services):
            self._close(name)

    # --- requests ---

    async def service_for(self, request: Request) -> Service:
        """Return the service of the model that a request names, once it is loaded. Errors: HttpError 403, 404, 503."""
        asked = await read_asked(request)
        name = self._named(request, asked)
        number = next(self._numbers)
        loaded = self._waiting[number] = self._loop.create_future()
        request.on_end = partial(self._leave, number)
        self.residents.request(number, name, time.monotonic(), self.kept_s(request, asked))
        self._act()
        await wait_for_model(request, asked, loaded)
        service = self._services.get(name)
        if service is None:
            raise HttpError(503, f"the engine of the model {name!r} has ended", headers=retry_after(1000))
        return service

    def find(self, request: Request, given: str | None) -> str:
        """Return the name of the model with this name, alias or adapter; of the first one if none is given.

        Errors: HttpError 403, 404.
        """
        allowed = self.names_for(request)
        if not given:
            if not allowed:
                raise HttpError(403, "the key may not use any model that is served here", param="model")
            return allowed[0]
        for name in (given, given.removesuffix(_TAG)):
            if (card := self._card_of(name)) is not None:
                keys = () if request.key is None else request.key.models
                if keys and name not in keys and card.name not in keys:
                    text = f"the key may not use this model; it may use: {', '.join(allowed)}"
                    raise HttpError(403, text, param="model")
                return card.name
        text = f"the model {given!r:.200} is not served here; served: {', '.join(allowed)}"
        raise HttpError(404, text, param="model", code=MODEL_NOT_FOUND)

    def names_for(self, request: Request) -> list[str]:
        """Return the names of the models that the caller's key may use."""
        keys = () if request.key is None else request.key.models
        return [name for name in self.cards if not keys or name in keys]

    def listed_for(self, request: Request) -> list[tuple[str, str]]:
        """Return (name, its model) of the models and adapters that the caller's key may use."""
        keys, found = () if request.key is None else request.key.models, list[tuple[str, str]]()
        for model, card in self.cards.items():
            service = self._services.get(model)
            loaded = () if service is None else service.adapters.names
            names = dict.fromkeys((model, *card.adapters, *loaded))  # a created model's adapter has its name
            found += [(name, model) for name in names if not keys or name in keys or model in keys]
        return found

    def kept_s(self, request: Request, asked: Asked) -> float | None:
        """Return how long a request keeps its model, if the caller's key may say so. Errors: HttpError 400."""
        return asked.kept_s() if may_manage(request) else None

    def unload(self, name: str) -> None:
        """Let a model leave the memory once it is idle."""
        self.residents.unload(name, time.monotonic())
        self._act()

    def service_of(self, name: str) -> Service | None:
        """Return the service of a model that is loaded."""
        return self._services.get(name)

    def _named(self, request: Request, asked: Asked) -> str:
        """Return the model that a request names in its body, its query or its path; otherwise one that is loaded."""
        query = parse_qs(request.query.decode("latin-1")).get("model", [None])[0]
        given = asked.model_name or query
        if given is None and request.method == "GET":
            given = next(iter(self._services), None)
            if given is None:
                raise HttpError(503, "no model is loaded: name one with ?model=NAME", headers=retry_after(1000))
        name = self.find(request, given)
        card, memory = self.cards[name], self.residents.memory
        if card.problem:
            raise HttpError(503, f"the model {name!r} cannot be loaded: {card.problem}", headers=_FINAL)
        if card.num_bytes is not None and card.num_bytes > memory:
            parts = f"weights {_size(card.weight_bytes)}, KV cache {_size(card.kv_bytes)}"
            text = f"the model {name!r} needs {_size(card.num_bytes)} ({parts}); all models together may take"
            raise HttpError(507, f"{text} {_size(memory)}", headers=_FINAL)
        return name

    def _card_of(self, name: str) -> Card | None:
        if name in self.cards:
            return self.cards[name]
        for card in self.cards.values():
            service = self._services.get(card.name)
            if name in card.aliases or name in card.adapters or (service and name in service.adapters.names):
                return card
        return None

    def _leave(self, number: int) -> None:
        self._waiting.pop(number, None)
        self.residents.leave(number, time.monotonic())
        self._act()

    # --- what is to be done ---

    def _act(self) -> None:
        """Do what the residents say."""
        for action in self.residents.take():
            match action:
                case Start(name):
                    self.link.send(Begin(name))
                case Stop(name):
                    self._close(name)
                    self.link.send(End(name))
                case Admit(number):
                    if (loaded := self._waiting.get(number)) is not None and not loaded.done():
                        loaded.set_result(None)
                case Refuse(number, text, is_final):
                    if (loaded := self._waiting.get(number)) is not None and not loaded.done():
                        headers = _FINAL if is_final else retry_after(1000)
                        loaded.set_exception(HttpError(503, text, headers=headers))

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self.residents.tick(time.monotonic())
        self._act()

    def _on_message(self, message: News) -> None:
        match message:
            case Known(cards):
                self._learn(cards)
            case Ready(name, address):
                self._open(name, address)
            case Ended(name, text):
                self._close(name)
                failure = self._failures.pop(name, "")
                self.residents.on_end(name, time.monotonic(), text or failure)
        self._act()

    def _learn(self, cards: Sequence[Card]) -> None:
        """Take the list of models. One that is loaded stays until it has ended."""
        new = {card.name: card for card in cards}
        for name, one in list(self.residents.by_name.items()):
            if one.place is Place.OUT and not one.waiting and new.get(name) != self.cards.get(name):
                self.residents.remove(name)
        for name, card in new.items():
            if name not in self.residents.by_name:
                kept_s = math.inf if card.keep_alive_s < 0 else card.keep_alive_s
                self.residents.put(name, card.num_bytes or 0, kept_s)
        self.cards = new

    def _open(self, name: str, address: str) -> None:
        task = self._loop.create_task(self._open_session(name, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open_session(self, name: str, address: str) -> None:
        """Open a session with a model's engine, on a thread, and serve it."""
        card = self.cards[name]
        try:
            engine = await asyncio.to_thread(_opened, address, self._tokenizers)
        except EngineCoreError as error:
            _log.error("no session with the model %s: %s", name, error)
            self._failures[name] = str(error)
            self.link.send(End(name))
            return
        names = tuple(one for one in (name, *card.aliases) if one not in card.adapters)  # the model without an adapter
        options = msgspec.structs.replace(
            self.shared.options,
            served_model_names=names or (f"{name}-base",),
            tool_call_parser=card.tool_call_parser or self.shared.options.tool_call_parser,
            reasoning_parser=card.reasoning_parser or self.shared.options.reasoning_parser,
            system=card.system,
        )
        service = self._services[name] = Service(engine, options, self.shared)
        with contextlib.suppress(EngineCoreError):  # it has died, which the host says next
            await service.adapters.look()
        self.residents.on_ready(name, time.monotonic())
        self._act()

    def _close(self, name: str) -> None:
        """End the session with a model's engine."""
        service = self._services.pop(name, None)
        if service is not None:
            service.pump.fail_all(HttpError(503, "the model was unloaded"), time.monotonic())
            service.close()
            self._loop.run_in_executor(None, service.engine.close)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def may_manage(request: Request) -> bool:
    """Return whether the caller may change the models, and say how long they stay."""
    return request.key is None or request.key.manages


def _opened(address: str, known: KnownTokenizers) -> EngineHandle:
    """Return a session with a model's engine, with what takes long: a bound on its texts."""
    engine = open_engine(address, known=known)
    try:
        if engine.tokenizer is not None:
            _ = engine.tokenizer.bound
    except BaseException:
        engine.close()
        raise
    return engine
