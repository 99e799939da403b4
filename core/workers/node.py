"""Node: this machine as one that runs workers for an engine on another machine; used by `engine-core worker`.

It runs what the engine requests as long as it hears from the engine. When the engine is gone, its workers end, and it
joins again.
"""

import os
import select
import socket as sockets
import time

import msgspec
import zmq

from core import log
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
    ToEngine,
    ToNode,
    Unknown,
    decode_to_node,
    encode,
)
from core.workers.nodes import files_fingerprint
from core.workers.processes import ChildProcess
from core.workers.wires import Place, make_wires
from ipc.errors import ConfigError, EngineCoreError, MalformedMessageError
from ipc.options.config import EngineConfig
from ipc.options.workers import num_machines
from ipc.version import VERSION
from ipc.wire.sockets import READABLE, Socket, connect_dealer, pending_events, signal_fd

_JOIN_S = 1.0  # between two attempts to join
_RETRY_S = 0.5  # before a new connection


class EngineLostError(Exception):
    """The engine is gone, or no longer accepts this machine."""


class Node:
    """A machine that runs workers. Used by one thread; the workers die with it.

    address: the engine's, for other machines. node: number of this machine; 0 = any. model: the model's files here;
    None = the engine's model name. Errors: AddressError.
    """

    def __init__(self, address: str, node: int = 0, model: str | None = None) -> None:
        self._address, self._wanted, self._model = address, node, model
        self._node = 0
        self._crew = 0
        self._workers: dict[int, ChildProcess] = {}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context: zmq.Context[Socket] = zmq.Context()
        connect_dealer(self._context, address, _without_marks).close(0)  # a bad address is refused at once

    def stop(self) -> None:
        """Make run() return soon. For any thread and for signal handlers."""
        os.eventfd_write(self._stop, 1)

    def run(self) -> None:
        """Run workers until stop(). Errors: ConfigError if the engine refuses this machine."""
        try:
            while True:
                try:
                    self._serve_session()
                    return
                except EngineLostError as error:
                    log.say(f"engine-core: {error}; the workers on this machine end, and it joins again")
                    time.sleep(_RETRY_S)
        finally:
            os.close(self._stop)
            self._context.destroy(0)

    def _serve_session(self) -> None:
        """Serve one connection until stop(). Errors: EngineLostError, ConfigError."""
        self._node = 0
        self._heard = time.monotonic()
        self._poller = select.poll()
        self._poller.register(self._stop, select.POLLIN)
        self._carrier = Carrier(self._poller, {})
        self._socket = connect_dealer(self._context, self._address, _without_marks)
        try:
            self._serve(signal_fd(self._socket))
        finally:
            self._end_workers()
            self._socket.close(0)

    def _serve(self, fd: int) -> None:
        self._poller.register(fd, select.POLLIN)
        due = 0.0
        while True:
            while pending_events(self._socket) & READABLE:
                self._receive()
            now = time.monotonic()
            if now >= due:
                due = now + (BEAT_S if self._node else _JOIN_S)
                self._beat(now)
            for each, events in self._poller.poll(max(0.0, due - time.monotonic()) * 1000):
                if each == self._stop:
                    return
                if each != fd:
                    self._look_at(each, events)

    def _beat(self, now: float) -> None:
        if not self._node:
            self._send(Join(VERSION, sockets.gethostname(), self._wanted))
        elif now - self._heard > SILENCE_S:
            raise EngineLostError(f"nothing was received from the engine for {SILENCE_S:g} s")
        else:
            self._send(Beat())

    def _send(self, message: ToEngine, *more: bytes) -> None:
        self._socket.send_multipart([encode(message), *more], zmq.NOBLOCK, copy=not more)

    def _look_at(self, fd: int, events: int) -> None:
        """Forward what a descriptor has, or report a worker's end."""
        if fd in self._carrier:
            stream, data = self._carrier.read(fd, events)
            if data:
                self._send(Bytes(self._crew, stream), data)
            return
        for number, worker in self._workers.items():
            if worker.ended_fd == fd and (end := worker.end) is not None:
                self._poller.unregister(fd)
                self._flush(number)
                self._send(Ended(self._crew, number, end.partition(" ")[2]))

    def _flush(self, number: int) -> None:
        """Forward the last output of a worker before its end is reported."""
        while self._carrier.has(number):
            data = self._carrier.take(number)
            if not data:
                return
            self._send(Bytes(self._crew, number), data)

    def _receive(self) -> None:
        try:
            head, *more = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            message = decode_to_node(head.buffer)
        except (zmq.Again, MalformedMessageError):
            return
        self._heard = time.monotonic()
        match message:
            case Bytes(crew, stream):
                if crew == self._crew and len(more) == 1:
                    self._carrier.write(stream, more[0].buffer)
            case _:
                self._obey(message)

    def _obey(self, message: ToNode) -> None:
        match message:
            case Describe(config, node):
                self._node = node
                self._send(self._describe(config))
            case Start(crew, config, places):
                self._start(crew, config, places)
            case Signal(crew, number, signal):
                if crew == self._crew and number in self._workers:
                    self._workers[number].signal(signal)
            case Refused(text):
                raise ConfigError(f"the engine at {self._address.partition('?')[0]} refuses this machine: {text}")
            case Unknown():
                raise EngineLostError("the engine has ended or was unreachable")
            case Beat() | Bytes():
                pass

    def _describe(self, config: EngineConfig) -> Described:
        try:
            found = files_fingerprint(self._own(config))
        except EngineCoreError as error:
            return Described("", f"{type(error).__name__}: {error}")
        which = f"machine {self._node} of {num_machines(config)}"
        log.say(f"engine-core: {which} of the engine at {self._address.partition('?')[0]}")
        return Described(found)

    def _own(self, config: EngineConfig) -> EngineConfig:
        return config if self._model is None else msgspec.structs.replace(config, model=self._model)

    def _start(self, crew: int, config: EngineConfig, places: list[Place]) -> None:
        """Start this machine's workers for a crew."""
        self._end_workers()
        self._crew = crew
        wiring = make_wires(places, self._node, has_store=bool(config.kv_stores))
        try:
            for number in sorted(wiring.wires):
                worker = ChildProcess(self._own(config), places[number], wiring.wires.pop(number))
                self._workers[number] = worker
                self._poller.register(worker.ended_fd, select.POLLIN)
                wiring.carried[number] = worker.channel.socket.detach()
        except (EngineCoreError, OSError) as error:
            wiring.close()
            for place in places:
                if place.node == self._node:
                    self._send(Ended(crew, place.number, f"could not be started: {error}"))
            return
        self._carrier = Carrier(self._poller, wiring.carried)
        self._send(Started(crew, {number: worker.pid for number, worker in self._workers.items()}))

    def _end_workers(self) -> None:
        for worker in self._workers.values():
            worker.kill()
            worker.close()
        self._workers = {}
        self._carrier.close()


def _without_marks(socket: Socket) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
