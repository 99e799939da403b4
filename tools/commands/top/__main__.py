"""`engine-core top`: a running engine, live in the terminal: requests, KV cache, clients, rates; explain and abort."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn, Self

import msgspec
from rich.console import Console
from rich.live import Live

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.errors import EngineCoreError, EngineDeadError
from ipc.wire.messages import PauseMode
from ipc.wire.scheduling_messages import RequestExplanation
from tools.commands.control import read_owner_file
from tools.commands.top.screen import explained, name_of, screen
from tools.commands.top.watch import Watch
from tools.flags.address import address_to_connect, owner_file_to_read
from tools.flags.options import ArgumentParser

# Keyboard: single keys from a terminal, whose settings are restored however the program ends.


_ESCAPES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}
_PLAIN = {b"\r": "enter", b"\n": "enter", b"\x03": "q", b"\x04": "q"}


class Keyboard:
    """The keys of a terminal, without echo. A context manager. fd: the terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._saved = termios.tcgetattr(fd)
        self._unread = b""

    def read(self, timeout: float) -> str | None:
        """Return the next key within `timeout` seconds: a character, up, down, enter; q at the terminal's end."""
        if not self._unread:
            if not select.select([self._fd], [], [], max(0.0, timeout))[0]:
                return None
            self._unread = os.read(self._fd, 64)
        if not self._unread:
            return "q"
        if (key := _ESCAPES.get(self._unread[:3])) is not None:
            self._unread = self._unread[3:]
            return key
        first, self._unread = self._unread[:1], self._unread[1:]
        return _PLAIN.get(first) or first.decode("ascii", "replace")

    def __enter__(self) -> Self:
        tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)


_HELLO_S = 2.0
_MOST_REQUESTS = 200  # in one call; the engine bounds its time for them
_PLAIN_WIDTH = 120


def main(arguments: Sequence[str]) -> int:
    """Watch an engine until `q`, and return the exit status. Errors: ConfigError, EngineDeadError without an engine."""
    parser = ArgumentParser(
        prog="engine-core top",
        usage="engine-core top [--connect ADDR] [--owner-file FILE] [--interval S] [--once | --json]",
        description="Show a running engine live. Without a terminal, or with --once, show it once as plain text.",
    )
    parser.add_argument("--connect", metavar="ADDR", help="the engine's address; default: that of `engine-core serve`")
    parser.add_argument(
        "--owner-file", metavar="FILE", help="the file of `serve --owner-file`; needed to abort and to pause"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two samples; default: %(default)g"
    )
    parser.add_argument("--once", action="store_true", help="take two samples, print, and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each sample")
    parsed = parser.parse_args(arguments)
    if not 0.05 <= parsed.interval <= 3600:
        parser.error("--interval must be from 0.05 to 3600 seconds")
    address, owner_file = address_to_connect(parsed.connect), owner_file_to_read(parsed.owner_file, parsed.connect)
    token = b"" if owner_file is None else read_owner_file(owner_file)
    watch = Watch(
        lambda: EngineClient(ZmqTransport(address), name="top", owner_token=token, hello_timeout=_HELLO_S),
        _MOST_REQUESTS,
    )
    try:
        watch.look()
        if watch.last is None:
            raise EngineDeadError(watch.error)
        if parsed.json:
            return _print_json(watch, parsed.interval)
        if parsed.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            return _print_once(watch, parsed.interval)
        return _run(watch, parsed.interval)
    finally:
        watch.close()


def _print_once(watch: Watch, interval: float) -> int:
    time.sleep(interval)
    watch.look()
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
    console.print(screen(watch, -1, "", height=_MOST_REQUESTS))
    return 0


def _print_json(watch: Watch, interval: float) -> int:
    while watch.last is not None:
        rates, look = watch.rates(), watch.last
        values = {
            "statistics": msgspec.structs.asdict(look.statistics),
            "rates": None if rates is None else msgspec.structs.asdict(rates),
            "error": watch.error,
        }
        sys.stdout.write(msgspec.json.encode(values).decode() + "\n")
        sys.stdout.flush()
        time.sleep(interval)
        watch.look()
    return 0


def _run(watch: Watch, interval: float) -> int:
    console = Console(highlight=False)
    selected, note, due = 0, "", 0.0
    previous = signal.signal(signal.SIGTERM, _stop)  # so that the terminal is put back
    try:
        with Keyboard(sys.stdin.fileno()) as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                if time.monotonic() >= due:
                    watch.look()
                    due = time.monotonic() + interval
                requests = [] if watch.last is None else watch.last.explanation.requests
                selected = max(0, min(selected, len(requests) - 1))
                live.update(screen(watch, selected, note, console.height), refresh=True)
                key = keyboard.read(due - time.monotonic())
                if key == "q":
                    return 0
                if key in ("up", "k", "down", "j"):
                    selected += 1 if key in ("down", "j") else -1
                elif key is not None and watch.client is not None:
                    note = _do(key, watch.client, requests[selected] if requests else None)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _stop(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _do(key: str, client: EngineClient, request: RequestExplanation | None) -> str:
    """Do a key's action; return the text to show."""
    actions: dict[str, tuple[str, Callable[[], object]]] = {
        "p": ("paused: no request begins", lambda: client.pause(PauseMode.NEW)),
        "r": ("resumed", client.resume),
    }
    if request is not None:
        actions["a"] = (f"{name_of(request)} was aborted", lambda: client.stop_request(request.session, request.number))
        if key in ("enter", "e"):
            with contextlib.suppress(EngineCoreError):
                return explained(request, client)
            return f"{name_of(request)} has ended"
    if key not in actions:
        return ""
    done, action = actions[key]
    try:
        action()
    except EngineCoreError as error:
        return str(error)
    return done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
