#!/usr/bin/env bash
# http.client: a chunked answer that is cut looks whole if it is read line by line.
#
# A server that dies inside a chunked body (a stream of server-sent events, for instance) never sends the last chunk.
# read() of Python's HTTPResponse then raises IncompleteRead. readline(), and a loop over the response, which
# urllib.request's callers use too, return b"" as at the end of a whole answer, and raise nothing.
#
# What follows: a client that reads events by lines must know the end from the events themselves: from a finish_reason or
# `data: [DONE]`, not from the end of the lines.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/program.py" <<'PROGRAM'
import socket
import threading
import urllib.request

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"data: one\n"


def serve(server: socket.socket, end: bytes) -> None:
    peer, _ = server.accept()
    peer.recv(4096)
    peer.sendall(HEAD + b"%x\r\n%b\r\n%b" % (len(EVENT), EVENT, end))
    peer.close()


for name, end in (("whole", b"0\r\n\r\n"), ("cut", b"")):
    for how in ("read()", "readline()", "for line"):
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=serve, args=(server, end))
            thread.start()
            with urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/") as answer:
                try:
                    if how == "read()":
                        seen = [answer.read()]
                    elif how == "for line":
                        seen = list(answer)
                    else:
                        seen = [answer.readline(), answer.readline()]
                except Exception as error:
                    seen = type(error).__name__
            thread.join()
        print(f"{name}, {how}: {seen}")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
whole, read(): [b'data: one\n']
whole, readline(): [b'data: one\n', b'']
whole, for line: [b'data: one\n']
cut, read(): IncompleteRead
cut, readline(): [b'data: one\n', b'']
cut, for line: [b'data: one\n']
EXPECTED
cd "$folder"
python3 -s program.py > seen
cat seen
diff expected seen > /dev/null || { echo "CHANGED; it was:"; cat expected; exit 1; }
