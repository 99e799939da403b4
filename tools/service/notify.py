"""systemd's notifications (sd_notify(3)): a service of Type=notify reports that it is ready, and its status."""

import asyncio
import contextlib
import os
import socket


def notify(state: str) -> None:
    """Send a state, such as "READY=1" or "STATUS=...", to the service manager; do nothing if there is none.

    A manager that does not listen is not an error.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.connect(name)
        sender.send(state.encode())


def keep_watchdog(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, report that this loop turns as often as the manager's WatchdogSec= requires; do nothing without it.

    A manager that gets no report within that time kills the service and restarts it.
    """
    wanted = os.environ.get("WATCHDOG_USEC", "")
    if not wanted.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    every_s = int(wanted) * 1e-6 / 2

    def beat() -> None:
        notify("WATCHDOG=1")
        loop.call_later(every_s, beat)

    beat()
