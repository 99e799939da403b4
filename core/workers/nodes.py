"""Nodes: the other machines that run workers for this engine's executor, and the engine's thread that talks to them.

They connect to the engine's address, so only this machine listens. The address's keys, or loopback, decide who may
connect. Streams between two other machines pass through this one.
"""

import itertools
import os
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq

from core import log
from core.border.allow_list import AllowList
from core.border.zap import start_zap
from core.workers.carrier import Carrier
from core.workers.node_messages import (
    BEAT_S,
    SILENCE_S,
    Beat,
    Bytes,
    Describe,
    Described,
    Ended,
    Join,
    Refused,
    Signal,
    Start,
    Started,
    ToNode,
    Unknown,
    decode_to_engine,
    encode,
)
from core.workers.processes import RemoteProcess
from core.workers.wires import Place, ends_of_streams
from ipc.errors import EngineStartError, MalformedMessageError
from ipc.files.model_files import model_fingerprint, resolve_model
from ipc.options.config import EngineConfig
from ipc.options.workers import master_address, num_machines
from ipc.version import VERSION
from ipc.wire.sockets import READABLE, Context, Socket, bind_router, keys_of, pending_events, signal_fd

_REMIND_S = 30.0  # between two log lines that name missing machines
_DESCRIBE_S = 60.0  # for a machine to read what identifies its model files
_LOG_S = 0.5  # for writing the last lines to standard error
_LOOK_S = 0.5  # between two checks whether the wait is over
_FRAMES_AT_ONCE = 64  # received before the thread looks at machines, streams and commands again


class _Seat:
    """A machine that has joined, or wants to."""

    def __init__(self, identity: bytes, host: str, node: int) -> None:
        self.identity, self.host, self.node = identity, host, node
        self.is_ready = False  # whether its files have been compared
        self.heard = time.monotonic()


class _Crew(NamedTuple):
    """The workers started last.

    processes: those on other machines. ends: the two machines at the ends of each stream.
    """

    number: int
    places: list[Place]
    ends: dict[int, tuple[int, int]]
    processes: dict[int, RemoteProcess]
    carrier: Carrier


class Nodes:
    """The machines 1 to N - 1 of N. config: the engine's, which has N and the address.

    The public methods may be called from any thread. Errors: AddressError; those of the model's files.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._num_nodes, self._config = num_machines(config), config
        self._fingerprint = files_fingerprint(config)
        address = master_address(config)
        keys = keys_of(address)
        self._context: Context = zmq.Context()
        try:
            start_zap(self._context, None if keys is None else AllowList(keys))
            self._router = bind_router(self._context, address, prepare=_without_marks)
        except BaseException:
            self._context.term()
            raise
        self.address = self._router.address.partition("?")[0]
        self._seats: dict[bytes, _Seat] = {}
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._crew: _Crew | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._poller = select.poll()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    # --- any thread ---

    def wait(self, seconds: float | None, is_over: Callable[[], bool]) -> None:
        """Wait until all machines have joined; None = no limit. is_over: returns whether to stop waiting.

        Errors: EngineStartError that names the missing ones.
        """
        end = None if seconds is None else time.monotonic() + seconds
        remind = 0.0
        with self._changed:
            while missing := self._missing():
                now = time.monotonic()
                if is_over() or self._is_closing:
                    raise EngineStartError("the executor is closed")
                which = f"{', '.join(f'machine {node}' for node in missing)} of {self._num_nodes}"
                if end is not None and now >= end:
                    raise EngineStartError(
                        f"{which} has not joined within {seconds:g} s: "
                        f"run `engine-core worker --connect` there with the address of {self.address}"
                    )
                if now >= remind:
                    log.say(f"engine-core: waiting for {which} to join at {self.address}{_until(end, now)}")
                    remind = now + _REMIND_S
                self._changed.wait(_LOOK_S)

    def _missing(self) -> list[int]:
        there = {seat.node for seat in self._seats.values() if seat.is_ready}
        return [node for node in range(1, self._num_nodes) if node not in there]

    def start(self, config: EngineConfig, places: list[Place], carried: dict[int, int]) -> list[RemoteProcess]:
        """Start the workers on other machines, and end the previous ones. Return the new ones by number.

        config: for a worker. carried: the local ends of streams (core/workers/wires.py), which this object owns from
        now on.
        """
        number = next(self._numbers)
        with self._changed:
            hosts = {seat.node: seat.host for seat in self._seats.values()}
        elsewhere = [place for place in places if place.node]
        processes = {
            place.number: RemoteProcess(hosts.get(place.node, "?"), self._sender(number, place)) for place in elsewhere
        }
        ends = dict(carried)
        self._tell(lambda: self._start(number, config, places, processes, ends))
        return list(processes.values())

    def _sender(self, crew: int, place: Place) -> Callable[[int], None]:
        def send(number: int) -> None:
            self._tell(lambda: self._send_to(place.node, Signal(crew, place.number, number)))

        return send

    def _tell(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        if not self._is_closing:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Make all machines end their workers, and stop the thread."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._serve(self._router.socket)
        except BaseException:  # without it no machine is heard, but the engine would look alive
            log.say(traceback.format_exc())
            log.say("engine-core: the other machines could not be served; the engine process ends")
            log.flush(_LOG_S)
            os._exit(1)
        finally:
            if self._crew is not None:
                self._crew.carrier.close()
            self._router.close()
            self._context.destroy(0)

    def _serve(self, socket: Socket) -> None:
        fd, beat = signal_fd(socket), 0.0
        self._poller.register(fd, select.POLLIN)
        self._poller.register(self._wake, select.POLLIN)
        while not self._is_closing:
            has_more = self._receive_some(socket)
            now = time.monotonic()
            if now >= beat:
                beat = now + BEAT_S
                self._look_at_seats(now)
            ready = self._poller.poll(0 if has_more else max(0.0, beat - time.monotonic()) * 1000)
            for each, events in ready:
                if each == self._wake:
                    os.eventfd_read(self._wake)
                elif each != fd:
                    self._carry(each, events)
            while self._commands:
                self._commands.popleft()()
        for identity in list(self._seats):
            self._send(identity, Unknown())

    def _receive_some(self, socket: Socket) -> bool:
        """Receive frames, and return whether there are more.

        A peer that sends without a pause must not keep the thread from noticing that a machine is lost: the engine
        would count as hung before that. The socket takes from each peer in turn.
        """
        for _ in range(_FRAMES_AT_ONCE):
            if not pending_events(socket) & READABLE:
                return False
            self._receive(socket)
        return True

    def _look_at_seats(self, now: float) -> None:
        for seat in list(self._seats.values()):
            limit_s = SILENCE_S if seat.is_ready else _DESCRIBE_S
            if now - seat.heard > limit_s:
                self._lose(seat, f"has sent nothing for {limit_s:g} s")
            else:
                self._send(seat.identity, Beat())

    def _carry(self, fd: int, events: int) -> None:
        crew = self._crew
        if crew is not None and fd in crew.carrier:
            stream, data = crew.carrier.read(fd, events)
            if data:
                self._forward(crew, stream, 0, data)

    def _forward(self, crew: _Crew, stream: int, source: int, data: "bytes | zmq.Frame") -> None:
        """Send a piece of a stream to the machine at its other end.

        Drop it if the stream does not end at the source.
        """
        first, second = crew.ends.get(stream, (-1, -1))
        if source not in (first, second):
            return
        target = first if second == source else second
        if target == 0:
            crew.carrier.write(stream, memoryview(data) if isinstance(data, bytes) else data.buffer)
        else:
            self._send_to(target, Bytes(crew.number, stream), data)

    def _send_to(self, node: int, message: ToNode, *more: "bytes | zmq.Frame") -> None:
        for seat in list(self._seats.values()):
            if seat.node == node and seat.is_ready:
                self._send(seat.identity, message, *more)

    def _send(self, identity: bytes, message: ToNode, *more: "bytes | zmq.Frame") -> None:
        try:
            self._router.socket.send_multipart([identity, encode(message), *more], zmq.NOBLOCK, copy=not more)
        except zmq.ZMQError:  # its connection has ended
            if (seat := self._seats.get(identity)) is not None:
                self._lose(seat, "has left")

    def _receive(self, socket: Socket) -> None:
        try:
            identity, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            message = decode_to_engine(frames[0].buffer) if frames else None
        except (zmq.Again, MalformedMessageError):
            return
        sender = identity.bytes
        seat = self._seats.get(sender)
        if seat is not None:
            seat.heard = time.monotonic()
        match message:
            case Join():
                if seat is None:
                    self._welcome(sender, message)
            case None | Beat():
                if seat is None:
                    self._send(sender, Unknown())
            case _ if seat is None:
                self._send(sender, Unknown())
            case Described():
                self._compare(seat, message)
            case Bytes(number, stream):
                if (crew := self._crew) is not None and crew.number == number and len(frames) == 2:
                    self._forward(crew, stream, seat.node, frames[1])
            case Started(number, pids):
                for worker, pid in pids.items():
                    if (process := self._process(number, worker)) is not None:
                        process.pid = pid
            case Ended(number, worker, text):
                if (process := self._process(number, worker)) is not None:
                    process.tell_end(text)

    def _process(self, crew: int, worker: int) -> RemoteProcess | None:
        return self._crew.processes.get(worker) if self._crew is not None and self._crew.number == crew else None

    def _welcome(self, identity: bytes, message: Join) -> None:
        """Give a machine a place if there is one. Otherwise it asks again."""
        if message.version != VERSION:
            self._send(identity, Refused(f"the engine has version {VERSION}, but this machine has {message.version}"))
            return
        if not 0 <= message.node < self._num_nodes:
            text = f"the engine has machines 0 (its own) to {self._num_nodes - 1}, but not {message.node}"
            self._send(identity, Refused(text))
            return
        taken = {seat.node for seat in self._seats.values()}
        free = [node for node in range(1, self._num_nodes) if node not in taken and message.node in (0, node)]
        if free:
            with self._changed:
                self._seats[identity] = _Seat(identity, message.host, free[0])
            self._send(identity, Describe(self._config, free[0]))

    def _compare(self, seat: _Seat, message: Described) -> None:
        """Accept a machine if its model files are the engine's."""
        text = message.error
        if not text and message.fingerprint != self._fingerprint:
            text = (
                f"the files of {self._config.model or 'the model'} there differ: their fingerprint is "
                f"{message.fingerprint:.16}, and the engine's {self._fingerprint:.16}"
            )
        if text:
            log.say(f"engine-core: machine {seat.node} ({seat.host}) is refused: {text}")
            self._send(seat.identity, Refused(text))
            self._seats.pop(seat.identity, None)
            return
        with self._changed:
            seat.is_ready = True
            self._changed.notify_all()
        log.say(f"engine-core: machine {seat.node} ({seat.host}) has joined")

    def _lose(self, seat: _Seat, text: str) -> None:
        with self._changed:
            self._seats.pop(seat.identity, None)
        if seat.is_ready:
            log.say(f"engine-core: machine {seat.node} ({seat.host}) {text}")
        if (crew := self._crew) is not None:
            for number, process in crew.processes.items():
                if crew.places[number].node == seat.node:
                    process.tell_end(f"is lost: its machine {text}")

    def _start(
        self,
        number: int,
        config: EngineConfig,
        places: list[Place],
        processes: dict[int, RemoteProcess],
        carried: dict[int, int],
    ) -> None:
        if self._crew is not None:
            self._crew.carrier.close()
        self._crew = _Crew(number, places, ends_of_streams(places), processes, Carrier(self._poller, carried))
        there = {seat.node for seat in self._seats.values() if seat.is_ready}
        for worker, process in processes.items():
            if places[worker].node not in there:
                process.tell_end("is lost: its machine has left")
        for node in there:
            self._send_to(node, Start(number, config, places))


def _until(end: float | None, now: float) -> str:
    """Describe when a wait ends. end, now: monotonic seconds; None = never."""
    return "" if end is None else time.strftime(", until %H:%M:%S", time.localtime(time.time() + end - now))


def files_fingerprint(config: EngineConfig) -> str:
    """Return the fingerprint of a config's model files, or "" if the executor reads no weights.

    Errors: those of the model's files.
    """
    if config.executor != "local" or config.load_format == "dummy":
        return ""
    return model_fingerprint(resolve_model(config.model))


def _without_marks(socket: Socket) -> None:
    """Never drop or delay what is sent: a machine that does not read is silent, and counts as gone."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
