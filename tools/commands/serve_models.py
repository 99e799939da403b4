"""`engine-core serve --models`: several models behind one HTTP address, each in an engine process of its own.

They are loaded when they are requested, and leave the memory when they are idle (docs/many_models.md). A first signal
lets the running answers end; a second one stops at once.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop

from frontend.engine.process import EngineProcess
from frontend.engine.restart_policy import RestartRules
from frontend.engine.standby_plan import StandbyKind
from frontend.engine.supervised_engine import SupervisedEngine
from frontend.http.many.catalog import Entry, read_catalog
from frontend.http.many.host import ModelHost
from frontend.http.many.messages import Card
from frontend.http.process.options import MANY
from ipc.errors import ConfigError
from ipc.log_lines import counted, log_line
from ipc.machine.memory import usable_memory_bytes
from ipc.wire.sockets import held_private_address, ipc_path
from tools.commands.http import HttpFront
from tools.service.model_cards import card_of
from tools.service.notify import keep_watchdog, notify

_DEFAULT_SHARE = 0.8  # of the machine's memory, for all models
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve_models(parsed: argparse.Namespace, options: dict[str, Any], tell: Callable[[str], None]) -> int:
    """Serve until a signal; return the exit status. options: of every engine. Errors: ConfigError, EngineStartError."""
    if parsed.http is None:
        raise ConfigError("--models is served over HTTP: add --port 8000, or --http HOST:PORT")
    given = {"MODEL": options.pop("model", None), "--served-model-name": parsed.served_model_name or None}
    given |= {"--standby": None if parsed.standby == StandbyKind.NO.value else parsed.standby}
    others = ("listen", "metrics", "owner_file")
    given |= {"--" + name.replace("_", "-"): getattr(parsed, name) for name in others}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} does not go together with --models")
    catalog = read_catalog(parsed.models, options)
    memory = parsed.memory or catalog.memory or int(_DEFAULT_SHARE * usable_memory_bytes())
    addresses = _Addresses()

    def make_engine(entry: Entry, card: Card) -> SupervisedEngine:
        config = entry.config()
        if config.kv_cache_memory_bytes is None and config.num_blocks_override is None:
            config = msgspec.structs.replace(config, kv_cache_memory_bytes=card.kv_bytes)
        address = addresses.of(entry.name)
        resume_s = parsed.resume_timeout if parsed.restarts > 0 else 0.0
        process = EngineProcess(config, listen=address, start_timeout=parsed.start_timeout, resume_s=resume_s)
        rules = RestartRules(most=max(0, parsed.restarts))
        return SupervisedEngine(process, rules, hang_s=parsed.hang_timeout, on_news=tell)

    host = ModelHost(
        catalog, memory, card_of=lambda entry: card_of(entry, memory), make_engine=make_engine, on_news=tell
    )
    for card in host.cards.values():
        if card.problem:
            tell(f"the model {card.name!r} cannot be loaded: {card.problem}")
    with HttpFront(parsed, tell) as front:
        return uvloop.run(_serve(host, front, addresses, parsed.log_format))


class _Addresses(contextlib.ExitStack):
    """The private addresses of this process: the host's, and one for each model's engines, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the address of a model, or with "" the host's. Errors: AddressError."""
        if name not in self._of:
            self._of[name] = self.enter_context(held_private_address())
        return self._of[name]


async def _serve(host: ModelHost, front: HttpFront, addresses: _Addresses, log_format: Any) -> int:
    loop, ended, num_signals = asyncio.get_running_loop(), asyncio.Event(), 0

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            notify("STOPPING=1")
            front.drain()
        else:
            ended.set()

    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal)
    with addresses:  # made and removed while signals have handlers
        try:
            path = ipc_path(addresses.of(""))
            await host.listen(path)
            await asyncio.to_thread(front.start, f"{MANY}{path}")
            if num_signals:
                front.drain()  # the signal may have arrived before the worker existed
            front.watch(loop)
            keep_watchdog(loop)
            print(log_line(log_format, f"engine-core: ready ({counted(len(host.cards), 'model')})", {}), flush=True)
            print(log_line(log_format, f"engine-core: HTTP at {front.url}", {}), flush=True)
            notify("READY=1")
            while not ended.is_set() and not front.has_ended:
                await asyncio.sleep(0.1)
            has_cut = await asyncio.to_thread(front.end)
        finally:
            await host.close()
    sys.stdout.flush()
    return 128 + signal.SIGTERM if has_cut or num_signals > 1 else os.EX_OK
