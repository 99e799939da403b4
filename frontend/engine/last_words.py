"""The last words of an engine that does not come back: said at its address to clients that wait for its return."""

import time

import zmq

from ipc.errors import AddressError
from ipc.wire.messages import ErrorCode, Refused, encode
from ipc.wire.sockets import Context, bind_router


def say_last_words(address: str, text: str, seconds: float) -> None:
    """Answer whoever says Hello at this address with a refusal, for so many seconds; then leave nothing behind.

    Where the address cannot be had, another engine may be there already: then nothing is said.
    """
    context: Context = zmq.Context()
    try:
        router = bind_router(context, address)
    except AddressError:
        context.term()
        return
    frame = encode(Refused(ErrorCode.UNAVAILABLE, text))
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            if router.socket.poll(int(left * 1000) + 1):
                identity, *_ = router.socket.recv_multipart()
                router.socket.send_multipart([identity, frame])
    finally:
        router.close(100)
        context.term()
