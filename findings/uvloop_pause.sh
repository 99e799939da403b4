#!/usr/bin/env bash
# uvloop forgets a pause_reading() that a protocol calls in connection_made().
#
# With asyncio's own loop, a protocol that pauses its transport in connection_made() gets no data until it resumes. With
# uvloop the transport starts to read after that call, whatever it said, so data_received() is called at once.
#
# What follows: a relay that pauses a client until its server is connected gets data that it has nowhere to send. It
# must keep what comes first, and pause then; in data_received() the pause holds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --target "$folder/packages" uvloop==0.23.0
cat > "$folder/program.py" <<'PROGRAM'
import asyncio
import socket

import uvloop


class Paused(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        transport.pause_reading()

    def data_received(self, data):
        received.append(data)
        self.transport.pause_reading()


async def scene():
    received.clear()
    server = await asyncio.get_running_loop().create_server(Paused, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as peer:
        for data in (b"first", b"second"):
            peer.sendall(data)
            await asyncio.sleep(0.3)
    server.close()
    return list(received)


received = []
print("asyncio:", asyncio.run(scene()))
print("uvloop:", uvloop.run(scene()))
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
asyncio: []
uvloop: [b'first']
EXPECTED
cd "$folder"
PYTHONPATH="$folder/packages" python3 -s program.py > seen
cat seen
diff expected seen > /dev/null || { echo "CHANGED; it was:"; cat expected; exit 1; }
