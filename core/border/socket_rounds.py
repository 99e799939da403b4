"""Border: the work at the engine's socket, in rounds: read client messages, send step outputs, end sessions.

There are no threads, sleeps or clocks here: core/border/io_thread.py decides which thread runs a round and when, and
tests/simulation simulates the socket and the time.
"""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

import zmq

from core.border.adapter_calls import AdapterCalls, AdapterShelf
from core.border.busy import Busy
from core.border.departure import Departure
from core.border.doorway import Doorway
from core.border.inbox import Inbox
from core.border.isolation import Isolation
from core.border.lease_clock import LeaseClock
from core.border.pacing import BURST_UNITS, Message, Pacing
from core.border.preparation import Preparation, Preparer
from core.border.reception import RETURN_S, Reception, Served
from core.border.sessions import Sessions
from core.border.weight_calls import WeightCalls, WeightReader
from core.inputs import EndPause, NewWeights
from ipc.wire.messages import CallDone, CallResult, ErrorCode, Outputs, ServerMessage
from ipc.wire.sockets import READABLE, Socket, pending_events, receive_event
from ipc.wire.start_messages import Isolate
from ipc.wire.weights_messages import Weights

AddressedMessage: TypeAlias = tuple[int, ServerMessage]  # (client, message)

#: Limits of what is received before results are sent again: messages, or frames of long ones, and bytes. Decoding the
#: densest content, lists of small numbers, takes 0.1 microseconds per byte.
_FRAMES_PER_ROUND, _BYTES_PER_ROUND = 32, 32 << 10
#: The same for dropped frames: libzmq lets no other message pass a long one, so its end must be reached soon.
_DROPPED_PER_ROUND = 1024
_PARKED_S = 0.001  # between rounds while messages are parked
_STEPS_PER_ROUND = 4  # steps sent before messages are received again
_MIN_RETRY_S, _MAX_RETRY_S = 0.01, 0.16  # between attempts to send to clients whose queues are full
_TICKS_PER_LEASE = 8
NOBODY = 0  # the client of inputs that come from no client


class Border:
    """Socket, monitor, sessions and reception, used by one thread at a time; inbox, outbox and drain_asked are shared.

    monitor: reports the socket's connections. doorway: limits their number; None = no limit. now: monotonic seconds.
    preparers: the kinds of preparation for requests, in order. adapters: None = not enabled. updates: None = the
    executor cannot change its weights.
    on_prepared: called by another thread when a round is needed for prepared requests. on_drain, on_shutdown: called
    during a round or receive() when the engine's owner requests it.
    """

    def __init__(
        self,
        socket: Socket,
        monitor: Socket,
        served: Served,
        now: float,
        *,
        preparers: Sequence[Preparer] = (),
        doorway: Doorway | None = None,
        adapters: AdapterShelf | None = None,
        updates: WeightReader | None = None,
        on_drain: Callable[[], None],
        on_shutdown: Callable[[], None],
        on_prepared: Callable[[], None] = lambda: None,
    ) -> None:
        self.inbox = Inbox()
        self.outbox: SimpleQueue[Sequence[AddressedMessage]] = SimpleQueue()  # results of steps, to be sent by round()
        self.sessions = Sessions(socket, self.inbox, served.client_weights)
        self.drain_asked = False  # set by any thread: the next round starts the drain
        self.departure = Departure()
        self.is_behind = False  # the last round left messages unread, because clients send faster than it reads
        self.shutdown_asked = self._has_ended_inbox = False  # nothing more is received; the inbox ends
        self._socket, self._monitor, self.doorway = socket, monitor, doorway
        self._lease_s = served.welcome.limits.lease_ms / 1000
        self._busy = Busy(self.sessions, now)
        self.pacing, self._num_units = Pacing(self.sessions, self._busy, now), 0  # units read and not counted yet
        self._clock = LeaseClock(self._lease_s / _TICKS_PER_LEASE, now)
        self._on_drain, self._on_shutdown = on_drain, on_shutdown
        self._meter = served.meter
        self._preparation = (
            Preparation(preparers, self.inbox, self._busy, served.welcome.epoch, wake=on_prepared)
            if preparers
            else None
        )
        self._adapters = AdapterCalls(adapters, on_prepared)
        self._weights = WeightCalls(updates, on_prepared)
        self._isolation = Isolation(self.inbox, served.welcome.epoch, served.isolate)
        self._forget_at_close(served)
        self.isolate: Isolate | None = None  # set by any thread: the next round applies it
        self.reception = Reception(
            served,
            self.sessions,
            self.inbox,
            self._clock,
            preparation=self._preparation,
            adapters=self._adapters,
            weights=self._weights,
            isolation=self._isolation,
            departure=self.departure,
            on_connect=self._close_disconnected,
            on_drain=self._drain_at_call,
            on_shutdown=self._shut_down,
        )
        self._next_look, self._retry_s = 0.0, _MIN_RETRY_S  # when to look for silent clients, on the lease clock
        # until then, clients of an earlier engine may come back
        self._returning_until = now + RETURN_S if served.welcome.epoch else now
        self._begun: tuple[bytes, zmq.Frame, int] | None = None  # a longer message: peer, first frame, count

    def _forget_at_close(self, served: Served) -> None:
        """Make everything that keeps a session's requests forget them when the session ends."""
        on_close = self.sessions.on_close
        if self._preparation is not None:
            on_close.append(self._preparation.forget)
        if self._meter is not None:
            on_close.append(self._meter.forget_client)
        on_close.append(self._isolation.forget)
        on_close.append(served.features.forget)

    def round(self, now: float) -> float | None:
        """Do all available work. Return the seconds until there may be more; None = not before something happens."""
        self._close_disconnected()
        may_receive = not self.inbox.is_overfull  # otherwise the clients' messages stay with the clients
        has_read = may_receive and self.receive(now)
        self.is_behind = may_receive and not has_read
        self._end_silent(now, has_read=has_read)
        if self._preparation is not None:
            if self._preparation:  # it paces clients that are not alone
                self._busy.look(now)
            self.send(self._preparation.take_done(), now)
        self.send(self._adapters.take_done(), now)
        self._take_weights(now)
        if (isolate := self.isolate) is not None:
            self.isolate = None
            self._isolation.change(isolate, now, self.reception.begin)
            self.send(self._isolation.take_done(), now)
        if self.drain_asked and not self._has_ended_inbox:
            self._end_inbox(now)
        self._send_outbox(now)
        progress = self.sessions.flush(now)
        self._retry_s = _MIN_RETRY_S if progress else min(2 * self._retry_s, _MAX_RETRY_S)
        has_unread = self.has_unread  # always ask: otherwise the file descriptor may stay readable
        return 0 if may_receive and has_unread else self.due_s(may_receive=may_receive)

    def _take_weights(self, now: float) -> None:
        """Pass weights that have been read to the engine, and failures to their clients."""
        for client, message in self._weights.take_done():
            if isinstance(message, NewWeights):
                self.inbox.put(client, message)
            else:
                self.send([(client, message)], now)

    def _drain_at_call(self) -> None:
        """Refuse new requests before the call is answered: what is received after it, even in this round, is late."""
        self._refuse_new()
        self._on_drain()

    def _refuse_new(self) -> None:
        if not self.reception.is_draining:
            self.reception.is_draining = self.sessions.is_draining = True
            self.inbox.put(NOBODY, EndPause())

    def _end_inbox(self, now: float) -> None:
        """Refuse new requests. End the inbox once everything that waits for something has gone into it.

        It waits for clients that have just come back, because the requests they had are not new. It also waits for
        clients of an earlier engine that are not back yet, so that they get an answer.
        """
        self._refuse_new()
        are_back = now >= self._returning_until and self.sessions.are_all_back(now)
        if not self._preparation and not self._isolation and are_back:
            self._has_ended_inbox = True
            self.inbox.put_end()

    def close(self) -> None:
        """Stop the threads that prepare requests and read adapters and weights, if there are any."""
        self._adapters.close()
        self._weights.close()
        if self._preparation is not None:
            self._preparation.close()

    def due_s(self, *, may_receive: bool) -> float | None:
        """Return the seconds until a round is due even if nothing happens, or None."""
        if not may_receive or (self.drain_asked and not self._has_ended_inbox):
            return _MIN_RETRY_S
        if self.pacing.num_parked:
            return _PARKED_S
        if self.sessions.has_unsent:
            return self._retry_s
        return self._clock.tick if any(session.has_lease for session in self.sessions.all) else None

    @property
    def has_unread(self) -> bool:
        """Return whether the socket has messages."""
        return bool(pending_events(self._socket) & READABLE)

    def receive(self, now: float) -> bool:
        """Read a bounded number of frames. Return whether everything that had arrived was read.

        A message is one frame. Of a longer one, which a peer may make of any number of frames, only the first is kept.
        """
        pacing, num_bytes, identity, has_read = self.pacing, 0, b"", False
        num_frames = self._handle_parked(now) if pacing.num_parked else 0
        while num_frames < _FRAMES_PER_ROUND and num_bytes < _BYTES_PER_ROUND:
            if self.inbox.is_overfull or self.shutdown_asked or (pacing.is_on and pacing.is_full):
                break
            if self._begun is None:
                if num_frames and not self.has_unread:  # zmq.Again costs more than this, and a request waits for it
                    has_read = True
                    break
                try:
                    identity = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    has_read = True
                    break
                frame, length = self._socket.recv(copy=False), 1
                num_frames += 1
                num_bytes += len(frame.buffer)
            else:
                identity, frame, length = self._begun
            if (length > 1 or frame.more) and not (length := self._drop_rest(identity, frame, length)):
                break
            if not (pacing.is_on and pacing.parks(Message(identity, frame, length), now)):
                self.reception.receive(identity, frame, length, now)
        self._num_units += num_frames + num_bytes // 1024
        if self._num_units >= BURST_UNITS:
            pacing.note(self._num_units, identity, now)
            self._num_units = 0
        return has_read

    def _drop_rest(self, identity: bytes, first: zmq.Frame, length: int) -> int:
        """Read what follows a message's first frame. Return the number of frames, 0 while there are more to read."""
        for _ in range(_DROPPED_PER_ROUND):
            length += 1
            if not self._socket.recv(copy=False).more:
                self._begun = None
                return length
        self._begun = (identity, first, length)
        return 0

    def _handle_parked(self, now: float) -> int:
        """Handle parked messages as far as their senders' budgets allow. Return their number."""
        num_handled = 0
        for message in self.pacing.due(now):
            self.reception.receive(*message, now)
            num_handled += 1
            if num_handled == _FRAMES_PER_ROUND or self.inbox.is_overfull or self.shutdown_asked:
                break
        return num_handled

    def send(self, messages: Sequence[AddressedMessage], now: float) -> None:
        """Send what a step produced. Messages to ended sessions are dropped.

        Measurements come last: no client waits for them, and they are not read before this returns.
        """
        for client, message in messages:
            if isinstance(message, Weights) and self._weights.end(message.mark):
                self.send_to_all(Weights(0, message.mark), now)
            if isinstance(message, CallDone):
                self._weights.note_done()
            session = self.sessions.of_client(client)
            if session is not None:
                self.sessions.send(session, message, now)
                session.requests.note(message)
                if session.use is not None and isinstance(message, Outputs):
                    session.use.note(message, now)
                session.num_calls -= isinstance(message, CallResult)
        if self._meter is not None:
            self._meter.note_messages(messages, now)

    def send_to_all(self, message: ServerMessage, now: float) -> None:
        """Send a message to every session."""
        for session in list(self.sessions.all):
            self.sessions.send(session, message, now)

    def _send_outbox(self, now: float) -> None:
        """Send a limited part of the outbox, so that an engine faster than the socket does not lock clients out."""
        for _ in range(min(_STEPS_PER_ROUND, self.outbox.qsize())):
            self.send(self.outbox.get_nowait(), now)

    def _shut_down(self) -> None:
        self.shutdown_asked = True
        self._on_shutdown()

    # --- sessions ended by the engine ---

    def _close_disconnected(self) -> None:
        """End the sessions whose connection ended, no matter how the client died."""
        while self._monitor.poll(0):
            event, value = receive_event(self._monitor)
            if self.doorway is not None:
                self.doorway.note(event, value)
            if event == zmq.EVENT_DISCONNECTED:
                for session in self.sessions.of_fd(value):
                    self.sessions.lose(session)

    def _end_silent(self, now: float, *, has_read: bool) -> None:
        """End the sessions whose lease has expired: clients that are stopped, or remote and unreachable."""
        self._clock.advance(now, has_read=has_read)
        if self._clock.time < self._next_look:
            return
        self._next_look = self._clock.time + self._clock.tick
        oldest = self._clock.time - self._lease_s
        for session in [one for one in self.sessions.all if one.has_lease and one.seen < oldest]:
            text = f"nothing arrived from this client for {self._lease_s:g} s (its lease); its requests were aborted"
            self.sessions.end(session, ErrorCode.DEADLINE_EXCEEDED, text)
