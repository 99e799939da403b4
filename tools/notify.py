"""systemd's notifications (sd_notify(3)): a service of Type=notify says that it is ready, and what it does."""

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Send a state, as "READY=1" or "STATUS=...", to the service manager; do nothing where there is none.

    A manager that does not listen is no error of the service's.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.connect(name)
        sender.send(state.encode())
