"""The cost of the border: time from submit to first token, and tokens/s, with the fake executor and token ids only.

Clients are bare sockets with the messages of ipc/, all in one thread, so that the engine and not the clients is
measured. One more record is for the product's own client.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import zmq

from core.engine import EngineCore
from core.executors.by_name import load_executor
from core.process.resolve import resolve
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.errors import EngineDeadError
from ipc.options.config import EngineConfig
from ipc.version import NAME, VERSION
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    AddRequest,
    Hello,
    Outputs,
    Welcome,
    decode_server_message,
    encode,
)
from ipc.wire.sockets import Socket, connect_dealer
from tools.commands.replay.latency import percentile
from tools.lab.bench.costs.wakeups import measure_wakeups
from tools.lab.bench.quiet import cpu_by_process, cpu_use, foreign_cpu
from tools.lab.bench.runs import request_params

CONNECTIONS = (1, 64)
NUM_STREAMS = 64  # requests that run at once while tokens/s are measured
_NUM_TOKENS = 1000  # of each stream
_NUM_FIRST_TOKENS = 1000
_WARM_UP = 50
_PROMPT = np.arange(20, 52, dtype="<i4")
_PATIENCE_MS = 10_000


class Connections:
    """Sessions with one engine, whose sockets are polled together. A context manager."""

    def __init__(self, address: str, count: int) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 16)
        self._sockets = [connect_dealer(self._context, address) for _ in range(count)]
        self._poller = zmq.Poller()
        self._numbers = 0
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
            socket.send(encode(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "bench")))
        num_open = 0
        while num_open < count:
            num_open += sum(isinstance(decode_server_message(frame), Welcome) for frame in self._receive())

    def __enter__(self) -> "Connections":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def request(self, max_tokens: int) -> AddRequest:
        """Return a request whose prompt shares no block with another."""
        self._numbers += 1
        prompt = _PROMPT.copy()
        prompt[0] += self._numbers
        return AddRequest(self._numbers, prompt.tobytes(), request_params(max_tokens), seed=0)

    def submit(self, connection: int, request: AddRequest) -> None:
        """Send the request over connection number `connection` (modulo their count)."""
        self._sockets[connection % len(self._sockets)].send(encode(request))

    def receive_tokens(self) -> int:
        """Wait for messages and return the number of tokens in them. Errors: EngineDeadError after 10 s."""
        return sum(map(_num_tokens, self._receive()))

    def receive_tokens_of(self, connection: int) -> int:
        """Wait for a message on this connection and return the number of tokens in it.

        Errors: EngineDeadError after 10 s.
        Polling 64 sockets would take longer than a hop; in reality, clients in 64 processes poll one each.
        """
        socket = self._sockets[connection % len(self._sockets)]
        if not socket.poll(_PATIENCE_MS):
            raise _silent()
        return _num_tokens(socket.recv(zmq.NOBLOCK))

    def _receive(self) -> list[bytes]:
        ready = self._poller.poll(_PATIENCE_MS)
        if not ready:
            raise _silent()
        return [socket.recv(zmq.NOBLOCK) for socket, _ in ready]


def _num_tokens(frame: bytes) -> int:
    message = decode_server_message(frame)
    return len(message.tokens) // 4 if isinstance(message, Outputs) else 0


def _silent() -> EngineDeadError:
    return EngineDeadError(f"the engine sent nothing for {_PATIENCE_MS / 1000:g} s")


def first_token_seconds(connections: Connections, count: int) -> list[float]:
    """Return the seconds to the first token of `count` requests, one at a time, over the connections in turn."""
    seconds = []
    for number in range(_WARM_UP + count):
        request = connections.request(1)
        begin = time.perf_counter()
        connections.submit(number, request)
        while not connections.receive_tokens_of(number):
            pass
        seconds.append(time.perf_counter() - begin)
    return seconds[_WARM_UP:]


def streaming_seconds(connections: Connections, num_tokens: int) -> float:
    """Return the seconds that NUM_STREAMS concurrent requests take, spread over the connections."""
    begin = time.perf_counter()
    for number in range(NUM_STREAMS):
        connections.submit(number, connections.request(num_tokens))
    missing = NUM_STREAMS * num_tokens
    while missing > 0:
        missing -= connections.receive_tokens()
    return time.perf_counter() - begin


def client_seconds(client: EngineClient, count: int) -> list[float]:
    """Return first_token_seconds() of the product's own client, which wakes a waiting thread."""
    seconds = []
    for number in range(_WARM_UP + count):
        prompt = _PROMPT.copy()
        prompt[0] += number
        token_ids, params = prompt.tolist(), request_params(1)
        begin = time.perf_counter()
        request = client.submit(token_ids, params, seed=0, streaming=True)
        client.wait(np.array([request]))
        seconds.append(time.perf_counter() - begin)
        client.discard([request])
    return seconds[_WARM_UP:]


def step_seconds(config: EngineConfig, count: int) -> list[float]:
    """Return the seconds of the same requests as steps of an engine core in this process, without the border."""
    executor = load_executor(config)
    config = resolve(
        config,
        executor.info,
        executor.determine_num_available_blocks,
        total_memory_bytes=1 << 32,
        num_cpus=1,
    )
    executor.initialize_cache(config)
    engine = EngineCore(config, executor)
    seconds = []
    for number in range(_WARM_UP + count):
        prompt = _PROMPT.copy()
        prompt[0] += number
        request = AddRequest(number, prompt.tobytes(), request_params(1), seed=0)
        begin = time.perf_counter()
        engine.step([(1, request)], time.monotonic_ns())
        seconds.append(time.perf_counter() - begin)
    return seconds[_WARM_UP:]


def measure_ipc(config: EngineConfig, *, rep: int) -> list[dict[str, Any]]:
    """Return one record for each measurement."""
    records: list[dict[str, Any]] = []
    step = summary_us(step_seconds(config, _NUM_FIRST_TOKENS))
    records.append({**_record("ipc wake-ups", 1, rep), "us": measure_wakeups()})
    with EngineProcess(config) as process:
        for count in CONNECTIONS:
            with Connections(process.address, count) as connections:
                seconds = first_token_seconds(connections, _NUM_FIRST_TOKENS)
                records.append(_record("ipc first token", count, rep, us=summary_us(seconds), step_us=step))
                streaming_seconds(connections, _WARM_UP)
                before = cpu_use()
                wall_s = streaming_seconds(connections, _NUM_TOKENS)
                after = cpu_use()
            num_tokens = NUM_STREAMS * _NUM_TOKENS
            use = {"cpu_s": cpu_by_process(before, after), "foreign_cpu_s": round(foreign_cpu(before, after), 2)}
            rate = {"streams": NUM_STREAMS, "out_tok": num_tokens, "out_tok_s": round(num_tokens / wall_s)}
            records.append(_record("ipc tokens", count, rep, **rate, wall_s=round(wall_s, 4), **use))
        with ExitStack() as stack:
            client = EngineClient(ZmqTransport(process.address, pidfd=process.pidfd))
            stack.callback(client.close)
            seconds = client_seconds(client, _NUM_FIRST_TOKENS)
            record = _record("ipc first token", 1, rep, us=summary_us(seconds), step_us=step)
            records.append({**record, "client": "EngineClient"})
    return records


def _record(workload: str, connections: int, rep: int, **fields: Any) -> dict[str, Any]:
    names = {"engine": NAME, "version": VERSION, "workload": workload, "rep": rep}
    return {**names, "connections": connections, "client": "socket", **fields}


def summary_us(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, median and 99th percentile in microseconds."""
    values = {"mean": sum(seconds) / len(seconds), "p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99)}
    return {name: round(value * 1e6, 1) for name, value in values.items()}
