"""The cost of HTTP: CPU per event, tokens/s, requests/s, time to first token, memory, ends; with the fake executor.

The clients are raw sockets in this process, which count events and parse nothing. CPU times are
those of the HTTP process, from /proc: they are comparable even if the three processes do not have a core each. They are
for streams alone; a separate process asks /health while the same streams run once more, because a client that is busy
with 1,000 streams would measure itself.

The fake executor draws its tokens from the whole vocabulary, so in the first streams most tokens' JSON is not cached
yet (frontend/http/replies/text_frames.py). "http paced again" repeats the same streams.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import uvloop

from core.executors.fake_options import with_fake_options
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from frontend.http.process.options import HttpOptions
from frontend.http.process.worker import HttpWorker
from frontend.http.wire.listen import bind_http
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from tools.commands.http import check_installed
from tools.commands.replay.latency import percentile
from tools.lab.bench.costs.wire import Peer, connect, post
from tools.lab.bench.ipc import client_seconds, summary_us

#: (connections, least microseconds of a step, tokens of each): the last one puts the server at its limit.
PACED = ((1, 8000, 400), (64, 8000, 400), (1000, 60_000, 60))
UNPACED = ((1, 20_000), (64, 2000), (1000, 100))  # (connections, tokens of each)
_NUM_SHORT = 3000
_SHORT_CONNECTIONS = 32
_NUM_FIRST = 300
_NUM_CLOSED = 50
_VOCABULARY = 49_152  # of the demo model
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def measure_http(config: EngineConfig, *, rep: int) -> Iterator[dict[str, Any]]:
    """Yield one record for each measurement. Errors: ConfigError without the extra."""
    check_installed()
    config = msgspec.structs.replace(
        with_fake_options(config, vocab_size=_VOCABULARY),
        model=str(resolve_model(config.model)),
        max_num_seqs=max(1024, config.max_num_seqs or 0),
    )
    if config.max_num_batched_tokens is None:  # so that a step has a token for each of 1,000 streams
        config = msgspec.structs.replace(config, max_num_batched_tokens=4096)
    for connections, step_us, num_tokens in PACED:
        with _Served(with_fake_options(config, step_us=step_us)) as served:
            record = uvloop.run(_stream(served, connections, num_tokens))
            yield {"workload": "http paced", "rep": rep, "step_us": step_us, **record}
            health = uvloop.run(_health(served, connections, num_tokens))
            yield {"workload": "http health", "rep": rep, "step_us": step_us, "connections": connections, **health}
            again = uvloop.run(_stream(served, connections, num_tokens))
            yield {"workload": "http paced again", "rep": rep, "step_us": step_us, **again}
    with _Served(config) as served:
        for connections, num_tokens in UNPACED:
            yield {"workload": "http unpaced", "rep": rep, **uvloop.run(_stream(served, connections, num_tokens))}
        yield {"workload": "http short", "rep": rep, **uvloop.run(_short(served))}
        yield {"workload": "http first token", "rep": rep, **uvloop.run(_first_token(served)), **_client(served)}
    with _Served(with_fake_options(config, step_us=2000)) as served:
        yield {"workload": "http disconnect", "rep": rep, **uvloop.run(_disconnect(served))}


class _Served(ExitStack):
    """A paced or unpaced engine and an HTTP process, for one measurement."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        try:
            self.engine = self.enter_context(EngineProcess(config))
            bound = self.enter_context(bind_http("127.0.0.1:0"))
            self.port = int(bound.getsockname()[1])
            self.worker = HttpWorker(self.engine.address, [bound], HttpOptions())
            self.worker.start()
            self.callback(self.worker.stop)
        except BaseException:
            self.close()
            raise

    def cpu_s(self) -> float:
        """Return the CPU seconds of the HTTP process so far."""
        with open(f"/proc/{self.worker.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def rss_mb(self) -> float:
        """Return the resident memory of the HTTP process."""
        with open(f"/proc/{self.worker.pid}/status") as file:
            line = next(line for line in file if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024


async def _stream(served: _Served, connections: int, num_tokens: int) -> dict[str, Any]:
    """Stream over all connections at once."""
    peers = [await connect(served.port) for _ in range(connections)]
    await _run_all(peers[: min(8, connections)], 4)  # warm up
    for peer in peers:
        peer.num_events = 0
    idle_mb, before, begin = served.rss_mb(), served.cpu_s(), time.perf_counter()
    running = asyncio.ensure_future(_run_all(peers, num_tokens))
    peak_mb = idle_mb
    while not running.done():
        await asyncio.wait((running,), timeout=0.5)
        peak_mb = max(peak_mb, served.rss_mb())
    wall_s, cpu_s = time.perf_counter() - begin, served.cpu_s() - before
    num_events = sum(peer.num_events for peer in peers)
    for peer in peers:
        peer.close()
    return {
        "connections": connections,
        "out_tok": connections * num_tokens,
        "out_tok_s": round(connections * num_tokens / wall_s),
        "events": num_events,
        "us_cpu_per_event": round(cpu_s * 1e6 / num_events, 1),
        "us_cpu_per_token": round(cpu_s * 1e6 / (connections * num_tokens), 1),
        "ttft_ms_p50": round(percentile([peer.first_s for peer in peers], 0.5) * 1e3, 1),
        "rss_mb": {"idle": round(idle_mb), "streaming": round(peak_mb)},
        "wall_s": round(wall_s, 2),
    }


async def _health(served: _Served, connections: int, num_tokens: int) -> dict[str, Any]:
    """Ask /health while such streams run: until the last of them, all started at once, has its first token, and after
    that.
    """
    peers = [await connect(served.port) for _ in range(connections)]
    probe = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"{__package__}.health_probe",
        str(served.port),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    await asyncio.sleep(0.5)  # it has started
    begin = time.monotonic()
    await _run_all(peers, num_tokens)
    begun = begin + max(peer.first_s for peer in peers)
    asked: list[tuple[float, float]] = msgspec.json.decode((await probe.communicate(b""))[0])
    for peer in peers:
        peer.close()
    start = [seconds for at, seconds in asked if begin <= at < begun]
    steady = [seconds for at, seconds in asked if at >= begun]
    return {
        name: {"asked": len(found), **{str(q): round(percentile(found, q) * 1e3, 2) for q in (0.5, 0.99, 0.999)}}
        for name, found in (("begin_ms", start), ("steady_ms", steady))
        if found
    }


async def _run_all(peers: list[Peer], num_tokens: int) -> None:
    body = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    asked = (
        peer.ask(post("/v1/completions", {**body, "prompt": [100 + i, *range(200, 231)]}))
        for i, peer in enumerate(peers)
    )
    await asyncio.gather(*asked)


async def _short(served: _Served) -> dict[str, Any]:
    """Short requests that are not streamed: 32 tokens in, 1 out."""
    peers = [await connect(served.port) for _ in range(_SHORT_CONNECTIONS)]

    async def ask(peer: Peer, first: int, count: int) -> None:
        for number in range(count):
            prompt = [1000 + first, 1000 + number, *range(200, 230)]
            await peer.ask(post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0}))

    await asyncio.gather(*(ask(peer, 5000 + i, 5) for i, peer in enumerate(peers)))
    before, begin, each = served.cpu_s(), time.perf_counter(), _NUM_SHORT // len(peers)
    await asyncio.gather(*(ask(peer, i, each) for i, peer in enumerate(peers)))
    wall_s, cpu_s, count = time.perf_counter() - begin, served.cpu_s() - before, each * len(peers)
    for peer in peers:
        peer.close()
    return {
        "connections": len(peers),
        "requests": count,
        "requests_s": round(count / wall_s),
        "us_cpu_per_request": round(cpu_s * 1e6 / count),
    }


async def _first_token(served: _Served) -> dict[str, Any]:
    """Time to first token of one idle connection."""
    peer, seconds = await connect(served.port), []
    for number in range(_NUM_FIRST):
        body = {"prompt": [20 + number, *range(21, 52)], "max_tokens": 1, "temperature": 0, "stream": True}
        await peer.ask(post("/v1/completions", body))
        seconds.append(peer.first_s)
    peer.close()
    return {"connections": 1, "us": summary_us(seconds[20:])}


def _client(served: _Served) -> dict[str, Any]:
    """The same through the product's ZeroMQ client, without HTTP."""
    client = EngineClient(ZmqTransport(served.engine.address, pidfd=served.engine.pidfd))
    try:
        return {"client_us": summary_us(client_seconds(client, _NUM_FIRST))}
    finally:
        client.close()


async def _disconnect(served: _Served) -> dict[str, Any]:
    """Time from a client's close until the engine has its blocks back."""
    client = EngineClient(ZmqTransport(served.engine.address, pidfd=served.engine.pidfd))
    seconds = []
    try:
        for number in range(_NUM_CLOSED):
            peer = await connect(served.port)
            body = {"prompt": [20 + number, *range(21, 52)], "max_tokens": 100_000, "stream": True, "ignore_eos": True}
            peer.send(post("/v1/completions", body))
            while not peer.num_events:
                await asyncio.sleep(0.002)
            begin = time.perf_counter()
            peer.close()
            while (await asyncio.to_thread(client.statistics)).num_running:
                pass
            seconds.append(time.perf_counter() - begin)
    finally:
        client.close()
    return {"closed": len(seconds), "ms": {str(q): round(float(np.quantile(seconds, q)) * 1e3, 1) for q in (0.5, 0.99)}}
