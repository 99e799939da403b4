"""ZAP (rfc.zeromq.org/27): checks which peers may connect. libzmq asks before it passes on a peer's first message.

On ipc, only processes of the engine's own user and of root may connect. On tcp with keys, only clients allowed by the
folder of keys (core/border/allow_list.py). On tcp without keys, which is bound to loopback, users cannot be
distinguished. Having a ZAP domain at all also makes libzmq refuse peers that speak ZMTP/1.0, which is what random bytes
look like.
"""

import os
import threading

import zmq

from core import log
from core.border.allow_list import AllowList
from ipc.wire.sockets import Context

_ENDPOINT = "inproc://zeromq.zap.01"


def is_allowed(address: str, uid: int) -> bool:
    """Return whether a peer may connect.

    address: "localhost:UID:GID:PID" for an ipc peer, which libzmq gets from the kernel; an IP address for tcp.
    """
    parts = address.split(":")
    if parts[0] == "localhost" and len(parts) == 4:
        return parts[1] in (str(uid), "0")
    return address in ("127.0.0.1", "::1", "::ffff:127.0.0.1") or address.startswith("127.")


def start_zap(context: Context, allowed: AllowList | None = None) -> None:
    """Answer for all sockets of this context that have a ZAP domain, in a separate thread, until the context ends.

    allowed: the clients whose keys may connect; None = the sockets use no keys.
    """
    # A shadow context: only this thread may close its socket.
    socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
    socket.linger = 0
    socket.bind(_ENDPOINT)
    threading.Thread(target=_serve, args=(socket, allowed), name="zap", daemon=True).start()


def _serve(socket: zmq.Socket[bytes], allow_list: AllowList | None) -> None:
    uid = os.getuid()
    try:
        while True:
            version, request_id, _domain, address, _identity, mechanism, *credentials = socket.recv_multipart()
            name: str | None = ""
            if allow_list is not None:
                name = allow_list.name_of(credentials[0]) if mechanism == b"CURVE" and credentials else None
            elif not is_allowed(address.decode("ascii", "replace"), uid):
                name = None
            verdict = (b"400", b"not allowed", b"") if name is None else (b"200", b"OK", name.encode())
            socket.send_multipart([version, request_id, *verdict, b""])
    except zmq.ContextTerminated:
        socket.close(0)
    except BaseException as error:  # without answers no client could connect, but the engine would look alive
        log.say(f"engine-core: the ZAP thread failed and the engine process ends: {type(error).__name__}: {error}")
        log.flush(1.0)
        os._exit(1)
