"""What a router costs and gains: time to first token compared with a direct connection, tokens/s, decisions, failover.

Clients are bare sockets with the messages of ipc/, except for failover, where the product's own client counts.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from core.executors.fake_options import read_fake_options, with_fake_options
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from frontend.fleet.placement import Placement
from frontend.fleet.prefix_index import PrefixIndex
from frontend.fleet.replicas import Replicas
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from ipc.wire.block_roots import PLAIN_ROOT
from ipc.wire.kv_events import KVBlocksStored
from tools.commands.replay.latency import percentile
from tools.lab.bench.ipc import Connections, first_token_seconds, streaming_seconds, summary_us

NUM_REPLICAS = 4
_FIRST_TOKENS, _ROUNDS = 300, 3
_NUM_TOKENS = 1000  # of each of the 64 streams
_DECISION_REPLICAS, _DECISION_TOKENS, _NUM_DECISIONS = 64, 1024, 2000
_NUM_STREAMS, _NUM_KILLS = 64, 3
_LIMIT_S = 60.0


def measure_route(config: EngineConfig, *, rep: int) -> Iterator[dict[str, Any]]:
    """Yield one record for each measurement, as it is made."""
    names = {"engine": NAME, "version": VERSION, "rep": rep}
    yield {**names, "workload": "route decision", **_decisions()}
    with _fleet(config, 1) as (
        engines,
        address,
        pid,
    ):  # several replicas in turn are each colder than one that is always asked
        yield {**names, "workload": "route first token", **_first_tokens(engines[0].address, address, pid)}
    with _fleet(config, NUM_REPLICAS) as (engines, address, pid):
        yield {**names, "workload": "route tokens", **_tokens(address, pid)}
    yield {**names, "workload": "route failover", **_failover(config)}


@contextmanager
def _fleet(config: EngineConfig, count: int) -> Iterator[tuple[list[EngineProcess], str, int]]:
    """Start engines and a router; yield the engines, the router's address and its process id."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-core-bench-"))
        engines = [EngineProcess(config, listen=f"ipc://{folder}/{index}") for index in range(count)]
        for engine in engines:
            stack.callback(engine.close)
            engine.start()
        for engine in engines:
            engine.wait_ready()
        address = f"ipc://{folder}/router"
        command = [sys.executable, "-m", "engine_core", "route", "--listen", address, "--replica"]
        router = stack.enter_context(
            subprocess.Popen([*command, *(engine.address for engine in engines)], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(router.terminate)
        assert router.stdout is not None
        router.stdout.readline()
        yield engines, address, router.pid


def _decisions() -> dict[str, Any]:
    """Return the time of a placement and of an event for a stored block."""
    rng, index, replicas, size = np.random.default_rng(1), PrefixIndex(), Replicas(), 16
    prompts = rng.integers(0, 32_000, (200, _DECISION_TOKENS)).astype("<i4")
    for row in range(_DECISION_REPLICAS):
        replicas.add(f"ipc:///{row}")
        replicas.is_open[row] = True
    num_blocks = _DECISION_TOKENS // size
    begin = time.process_time()  # it delays no decision
    num_stored = 0
    for row in range(_DECISION_REPLICAS):
        for which in rng.integers(0, len(prompts), 20).tolist():
            depth = int(rng.integers(1, num_blocks + 1))
            contents = np.arange(which * num_blocks, which * num_blocks + depth)
            parents = np.where(np.arange(depth) == 0, PLAIN_ROOT, contents - 1)
            tokens = prompts[which, : depth * size].tobytes()
            event = KVBlocksStored(contents.astype("<i8").tobytes(), parents.astype("<i8").tobytes(), tokens, size)
            index.apply(row, [event])
            num_stored += depth
    stored_us = (time.process_time() - begin) / num_stored * 1e6
    placement, seconds = Placement(replicas, "prefix", 0), []
    frames = [prompt.tobytes() for prompt in prompts]
    for number in range(_NUM_DECISIONS):
        frame = frames[number % len(frames)]
        begin = time.perf_counter()
        matches = index.match(PLAIN_ROOT, frame)
        row = placement.choose(matches, _DECISION_TOKENS)
        seconds.append(time.perf_counter() - begin)
        replicas.queued[row] += _DECISION_TOKENS - matches.get(row, 0)
        replicas.live[row] += 1
    held = {"replicas": _DECISION_REPLICAS, "prompt_tokens": _DECISION_TOKENS, "block_size": size}
    return {**held, "us": summary_us(seconds), "us_per_stored_block": round(stored_us, 3)}


@contextmanager
def _bare_hop(engine: str) -> Iterator[str]:
    """Start a process that only passes frames on (tools/lab/bench/costs/bare_hop.py); yield its address."""
    with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
        address = f"ipc://{folder}/hop"
        command = [sys.executable, "-m", f"{__package__}.bare_hop", address, engine]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                yield address
            finally:
                process.kill()


def _first_tokens(direct: str, routed: str, pid: int) -> dict[str, Any]:
    """Return the time to first token of one client at an engine, through a process that only passes frames on, and
    through the router, turn about; and the router's CPU time for each of these requests.
    """
    seconds: dict[str, list[float]] = {"direct": [], "bare_hop": [], "routed": []}
    cpu_s = 0.0
    with (
        _bare_hop(direct) as hop,
        Connections(direct, 1) as one,
        Connections(hop, 1) as passed,
        Connections(routed, 1) as other,
    ):
        for _ in range(_ROUNDS):
            seconds["direct"] += first_token_seconds(one, _FIRST_TOKENS)
            seconds["bare_hop"] += first_token_seconds(passed, _FIRST_TOKENS)
            before = _cpu_s(pid)
            seconds["routed"] += first_token_seconds(other, _FIRST_TOKENS)
            cpu_s += _cpu_s(pid) - before
    found = {name: summary_us(values) for name, values in seconds.items()}
    added, by_hop = (
        {name: round(found[way][name] - found["direct"][name], 1) for name in ("p50", "p99")}
        for way in ("routed", "bare_hop")
    )
    cpu_us = round(cpu_s / len(seconds["routed"]) * 1e6, 1)
    each = {f"{name}_us": one for name, one in found.items()}
    return {
        "requests": len(seconds["direct"]),
        **each,
        "added_us": added,
        "added_by_bare_hop_us": by_hop,
        "router_cpu_us": cpu_us,
    }


def _tokens(address: str, pid: int) -> dict[str, Any]:
    """Return tokens/s of 64 streams for each replica over one connection, and what the router's CPU time would
    allow.
    """
    with Connections(address, 1) as connections:
        streaming_seconds(connections, 50)
        before = _cpu_s(pid)
        begin = time.perf_counter()
        for _ in range(NUM_REPLICAS):
            for _ in range(64):
                connections.submit(0, connections.request(_NUM_TOKENS))
        missing = total = NUM_REPLICAS * 64 * _NUM_TOKENS
        while missing > 0:
            missing -= connections.receive_tokens()
        wall_s, cpu_s = time.perf_counter() - begin, _cpu_s(pid) - before
    return {
        "streams": NUM_REPLICAS * 64,
        "out_tok": total,
        "out_tok_s": round(total / wall_s),
        "router_cpu_s": round(cpu_s, 3),
        "out_tok_per_router_cpu_s": round(total / cpu_s),
    }


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _failover(config: EngineConfig) -> dict[str, Any]:
    """Return how long streams pause when a replica is killed, over several kills."""
    if not read_fake_options(config).step_us:
        config = with_fake_options(config, step_us=5000)
    pauses: list[float] = []
    noticed: list[float] = []
    for _ in range(_NUM_KILLS):
        with _fleet(config, 3) as (engines, address, _):
            client = EngineClient(ZmqTransport(address))
            try:
                _kill_once(engines[0], client, noticed, pauses)
            finally:
                client.close()
    return {
        "streams": _NUM_STREAMS,
        "kills": _NUM_KILLS,
        "step_us": read_fake_options(config).step_us,
        "noticed_ms": _summary_ms(noticed),
        "pause_ms": _summary_ms(pauses),
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _kill_once(engine: EngineProcess, client: EngineClient, noticed: list[float], pauses: list[float]) -> None:
    """Kill an engine under streams; add when the router had placed its requests again, and the longest gap of each
    stream that ran there.
    """
    params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
    numbers = [client.submit([number + 5] * 32, params, seed=0) for number in range(_NUM_STREAMS)]
    lengths = dict.fromkeys(numbers, 0)
    last = dict.fromkeys(numbers, 0.0)
    gaps = dict.fromkeys(numbers, 0.0)
    killed_at, end = 0.0, time.monotonic() + _LIMIT_S
    while any(not client.read(number).finish for number in numbers):
        now = time.monotonic()
        assert now < end, "the streams do not end"
        for number in numbers:
            if (length := len(client.read(number).token_ids)) > lengths[number]:
                if killed_at and last[number]:
                    gaps[number] = max(gaps[number], now - last[number])
                lengths[number], last[number] = length, now
        if not killed_at and min(lengths.values()) > 20:
            killed_at = time.monotonic()
            os.kill(engine.pid, signal.SIGKILL)
            while client.replicas().num_moved == 0:
                assert time.monotonic() < end, "the router does not notice"
            noticed.append(time.monotonic() - killed_at)
        time.sleep(0.001)
    moved = client.replicas().num_moved
    pauses += sorted(gaps.values())[-moved:]
    client.discard(numbers)


def _summary_ms(seconds: list[float]) -> dict[str, float]:
    return {
        name: round(percentile(seconds, share) * 1000, 1) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
