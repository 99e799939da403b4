"""A workload through a fleet: the pure routing core over real engine cores, all under one virtual clock."""

import heapq
from typing import NamedTuple

import msgspec
import numpy as np

from core.engine import EngineCore
from core.inputs import EngineInput
from frontend.fleet.fleet import Fleet
from frontend.fleet.membership import Close, Open, Send
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Ints
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    AddRequest,
    Heartbeat,
    Limits,
    ServerMessage,
    Welcome,
    decode_client_message,
)
from tools.lab.traces.simulation import Observed, Observer, StepTime, TimedExecutor
from tools.lab.traces.workload import TimedRequest

_CLIENT = 1
_PAUSE_NS = 1_000_000  # from a step with nothing to run to the next one


class FleetRun(NamedTuple):
    """The clients' results, the first placement of each request, and the number of tokens computed by each replica."""

    observed: Observed
    placements: list[int]  # replica of each request sent, in order
    computed_tokens: list[int]  # by replica


class _Replica:
    """An engine core with its own clock: busy until a point in time."""

    def __init__(self, config: ResolvedConfig, step_time: StepTime, epoch: int) -> None:
        self.executor = TimedExecutor(config, step_time)
        self.core = EngineCore(config, self.executor, epoch)
        self.executor.scheduler = self.core.scheduler
        self.inbox: list[tuple[int, EngineInput]] = []
        self.is_busy = False

    def step(self, now_ns: int) -> tuple[list[ServerMessage], int]:
        """Run a step; return its messages and its duration in ns."""
        inbox, self.inbox = self.inbox, []
        self.executor.duration_ns = 0
        replies = [reply for _, reply in self.core.step(inbox, now_ns)]
        return [*replies], self.executor.duration_ns or _PAUSE_NS


class _FleetSimulation:
    def __init__(self, config: ResolvedConfig, count: int, step_time: StepTime, policy: str, *, seed: int) -> None:
        self.replicas = [_Replica(config, step_time, epoch) for epoch in range(count)]
        self.fleet = Fleet(policy=policy, seed=seed, name="simulated")
        self.placements: list[int] = []
        self._welcomes = [self._welcome(config, epoch) for epoch in range(count)]
        self._events: list[tuple[int, int, int, list[ServerMessage]]] = []  # (time, serial, replica, a step's messages)
        self._num_events = 0
        for index in range(count):
            self.fleet.membership.join(f"ipc:///{index}")
        self._obey(0)
        self.end_ns = 0

    def run(self, requests: list[TimedRequest]) -> Observed:
        observer = Observer([request.arrival_ns for request in requests])
        next_request = 0
        while next_request < len(requests) or self._events:
            arrival_ns = requests[next_request].arrival_ns if next_request < len(requests) else None
            if self._events and (arrival_ns is None or self._events[0][0] < arrival_ns):
                now_ns, _, index, messages = heapq.heappop(self._events)
                self.replicas[index].is_busy = False
                for message in messages:
                    self.fleet.receive(index, message, now_ns / 1e9)
            else:
                assert arrival_ns is not None
                now_ns = arrival_ns
                request = msgspec.structs.replace(requests[next_request].message, number=next_request)
                self.fleet.submit(_CLIENT, request, now_ns / 1e9)
                next_request += 1
            self.fleet.tick(now_ns / 1e9)
            self._obey(now_ns)
            observer.take([(client, reply) for client, reply in self.fleet.take_messages()], now_ns, now_ns)
            self._begin_steps(now_ns)
            self.end_ns = now_ns
        stats = self.replicas[0].core.scheduler.stats
        for replica in self.replicas[1:]:
            other = replica.core.scheduler.stats
            stats.num_steps += other.num_steps
            for name in ("num_preemptions", "num_scheduled_tokens", "prefix_cache_hits", "prefix_cache_queries"):
                setattr(stats, name, getattr(stats, name) + getattr(other, name))
        return observer.observed(self.end_ns, stats)

    def _begin_steps(self, now_ns: int) -> None:
        for index, replica in enumerate(self.replicas):
            if not replica.is_busy and (replica.inbox or replica.core.has_work):
                messages, duration_ns = replica.step(now_ns)
                replica.is_busy = True
                self._num_events += 1
                heapq.heappush(self._events, (now_ns + duration_ns, self._num_events, index, messages))

    def _obey(self, now_ns: int) -> None:
        while self.fleet.orders:
            orders = self.fleet.orders.copy()
            self.fleet.orders.clear()
            for order in orders:
                match order:
                    case Open(row):
                        self.fleet.receive(row, self._welcomes[row], now_ns / 1e9)
                    case Send(row, frame):
                        message = decode_client_message(frame)
                        if isinstance(message, AddRequest):
                            self.placements.append(row)
                        if not isinstance(message, Heartbeat):
                            self.replicas[row].inbox.append((_CLIENT, message))  # type: ignore[arg-type]
                    case Close():
                        pass

    def _welcome(self, config: ResolvedConfig, epoch: int) -> Welcome:
        info = self.replicas[epoch].executor.info
        limits = Limits(config.max_model_len, config.max_num_seqs, 2**31)
        return Welcome(
            PROTOCOL_MAJOR,
            PROTOCOL_MINOR,
            "",
            f"{epoch}",
            epoch,
            b"",
            info.name,
            info.fingerprint,
            "",
            info.numerics,
            info.vocab_size,
            limits,
        )


def simulate_fleet(
    config: ResolvedConfig, requests: list[TimedRequest], step_time: StepTime, *, count: int, policy: str, seed: int = 0
) -> FleetRun:
    """Run the requests through a fleet of `count` engines with this config, until all have ended.

    requests: in order of arrival. KV events reach the fleet at the end of the step that made them.
    """
    simulation = _FleetSimulation(config, count, step_time, policy, seed=seed)
    observed = simulation.run(requests)
    computed = [replica.core.scheduler.stats.num_prompt_tokens for replica in simulation.replicas]
    return FleetRun(observed, simulation.placements, computed)


def busiest_share(computed_tokens: list[int]) -> float:
    """Return the largest load of a replica divided by the mean."""
    columns: Ints = np.array(computed_tokens)
    return float(columns.max() / columns.mean()) if columns.sum() else 1.0
