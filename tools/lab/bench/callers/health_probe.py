"""`python -m tools.lab.bench.callers.health_probe PORT`: ask /health repeatedly from an otherwise idle process.

A load generator cannot time /health, because its own loop is busy with the streams. When standard input ends, this
prints a JSON list of (monotonic seconds of the request, seconds until its answer).
"""

import json
import select
import socket
import sys
import time

_PAUSE_S = 0.005
_QUESTION = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def main() -> int:
    """Ask until standard input ends."""
    asked: list[tuple[float, float]] = []
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
            begin = time.monotonic()
            peer.sendall(_QUESTION)
            answer = peer.recv(65_536)
            asked.append((begin, time.monotonic() - begin))
            if not answer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"/health answered {answer[:80]!r}")
    print(json.dumps(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
