"""The IO thread: owns the engine's socket, its sessions and the border's rules; the engine thread never touches them.

In: frames are decoded, checked and answered here, or put into the inbox. Out: the messages of each step are taken from
the outbox, encoded and sent. Its death is the process's death, because an engine that cannot be reached looks alive.
"""

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from core.engine import EngineInput
from core.inbox import Inbox
from core.request_validation import decode_request_number, validate_request
from core.sessions import MAX_SESSIONS, Session, Sessions
from ipc.errors import InvalidRequestError, MalformedMessageError
from ipc.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    AddRequest,
    EngineStopping,
    ErrorCode,
    GetStatistics,
    GetTokenizer,
    Goodbye,
    Hello,
    Refused,
    RequestFailed,
    ResetPrefixCache,
    ServerMessage,
    TokenizerFiles,
    Welcome,
    decode_client_message,
    encode,
)
from ipc.sockets import BoundRouter, Context

MAX_OUTBOX_STEPS = 256  # results of steps that wait to be sent; then the engine waits
_MESSAGES_PER_ROUND = 256  # received before results are sent again
_RETRY_MS = 10  # between attempts to send to a client whose queue is full
_FLUSH_S = 0.5  # given to slow clients when the engine stops

Addressed = tuple[int, ServerMessage]


class IOThread:
    """Made and bound by the main thread, then run on its own. Takes ownership of the socket and of its context.

    welcome: what every client is told; session_token and minor are filled in for each. tokenizer: the files a client
    may ask for.
    """

    def __init__(self, context: Context, router: BoundRouter, welcome: Welcome, tokenizer: TokenizerFiles) -> None:
        self._thread = threading.Thread(target=self._run, name="io", daemon=True)
        self.inbox = Inbox()
        self.num_malformed = 0  # messages that were not of this protocol
        self.num_dropped = 0  # sessions ended for not reading
        self._outbox: queue.Queue[Sequence[Addressed] | EngineStopping] = queue.Queue(MAX_OUTBOX_STEPS)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()
        self._context = context
        self._router = router
        self._socket = router.socket
        self._sessions = Sessions(router.socket)
        self._welcome = welcome
        self._tokenizer = tokenizer
        self._drain_asked = False
        self._is_draining = False

    # --- called by other threads ---

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, messages: Sequence[Addressed]) -> None:
        """What a step produced. Waits while MAX_OUTBOX_STEPS are unsent."""
        self._outbox.put(messages)
        self._wake_up()

    def drain(self) -> None:
        """Refuse new requests from now on and end the inbox."""
        self._drain_asked = True
        self._wake_up()

    def finish(self, error: str, timeout: float) -> None:
        """Send what is in the outbox, then EngineStopping(error) to every session, and end. May be called again."""
        try:
            self._outbox.put(EngineStopping(error), timeout=timeout)
        except queue.Full:
            return
        self._wake_up()
        self._thread.join(timeout)

    def _wake_up(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:  # else the thread has ended
                os.eventfd_write(self._wake, 1)

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._serve()
        except BaseException:
            traceback.print_exc()
            print("engine-core: the IO thread failed; the engine process ends", file=sys.stderr, flush=True)
            self._router.remove_files()
            os._exit(1)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        while True:
            may_receive = not self.inbox.is_overfull  # or the clients' messages stay with them
            poller.modify(self._socket, zmq.POLLIN if may_receive else 0)
            ready = dict(poller.poll(None if may_receive and not self._sessions.backlogged else _RETRY_MS))
            if self._monitor in ready:
                self._close_disconnected()
            if self._socket in ready:
                self._receive()
            if self._wake in ready:
                os.eventfd_read(self._wake)
                if self._drain_asked and not self._is_draining:
                    self._is_draining = True
                    self.inbox.put_end()
                if (stopping := self._send_outbox()) is not None:
                    self._stop(stopping)
                    return
            self._flush_backlogs()

    def _send_outbox(self) -> EngineStopping | None:
        while True:
            try:
                messages = self._outbox.get_nowait()
            except queue.Empty:
                return None
            if isinstance(messages, EngineStopping):
                return messages
            for client, message in messages:
                session = self._sessions.of_client(client)
                if session is not None:
                    self._send(session, message)

    def _stop(self, stopping: EngineStopping) -> None:
        for session in list(self._sessions.all):
            self._send(session, stopping)
        deadline = time.monotonic() + _FLUSH_S
        while self._sessions.backlogged and time.monotonic() < deadline:
            self._flush_backlogs()
            time.sleep(_RETRY_MS / 1000)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._router.close()
        self._context.term()  # returns when all is sent or the socket's linger time is over
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1

    # --- sessions ---

    def _send(self, session: Session, message: ServerMessage) -> None:
        if not self._sessions.send(session, encode(message)):
            self.num_dropped += bool(session.backlog)
            self._close(session)

    def _close(self, session: Session) -> None:
        """The engine aborts the session's requests when it meets the Goodbye."""
        self._sessions.close(session)
        self.inbox.put(session.client, Goodbye())

    def _flush_backlogs(self) -> None:
        for session in self._sessions.backlogged:
            if not self._sessions.flush(session):
                self._close(session)

    def _close_disconnected(self) -> None:
        """End the sessions whose connection ended, however the client died."""
        while self._monitor.poll(0):
            fd = int(recv_monitor_message(self._monitor)["value"])
            for session in self._sessions.of_fd(fd):
                self._close(session)

    def _hello(self, identity: bytes, fd: int, session: Session | None, hello: Hello) -> None:
        ours = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
        if hello.major != PROTOCOL_MAJOR:
            text = (
                f"the engine speaks protocol {ours} and the client {hello.major}.{hello.minor}: "
                f"use the same release of engine-core on both sides (the engine's is {self._welcome.server_version})"
            )
            self._refuse(identity, ErrorCode.VERSION_MISMATCH, text)
        elif self._is_draining:
            self._refuse(identity, ErrorCode.UNAVAILABLE, "the engine is finishing its last requests and then stops")
        elif session is None and len(self._sessions) >= MAX_SESSIONS:
            text = f"the engine has {MAX_SESSIONS} clients, which is its limit; try again later"
            self._refuse(identity, ErrorCode.RESOURCE_EXHAUSTED, text)
        else:
            if session is None:
                self._close_disconnected()  # the kernel may have given this client the fd of one that has left
                session = self._sessions.open(identity, fd, hello.client_name)
            minor = max(0, min(PROTOCOL_MINOR, hello.minor))
            self._send(session, msgspec.structs.replace(self._welcome, minor=minor, session_token=session.token))

    def _refuse(self, identity: bytes, code: ErrorCode, text: str) -> None:
        self._sessions.send_to_stranger(identity, encode(Refused(code, text)))

    # --- messages of clients ---

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_ROUND):
            if self.inbox.is_overfull:
                return
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame, num_frames = zmq.Frame(), 0
            while self._socket.getsockopt(zmq.RCVMORE):
                part = self._socket.recv(copy=False)  # only the first is kept: a peer may send any number
                frame, num_frames = (part, 1) if num_frames == 0 else (frame, num_frames + 1)
            if num_frames == 1:
                self._decode(identity, frame)
            else:
                self._reject(identity, b"", f"a message is one frame, this has {num_frames}")

    def _decode(self, identity: bytes, frame: zmq.Frame) -> None:
        session = self._sessions.of_identity(identity)
        try:
            message = decode_client_message(frame.buffer)
        except MalformedMessageError as error:
            self._reject(identity, frame.bytes, str(error))
            return
        if isinstance(message, Hello):
            self._hello(identity, int(frame.get(zmq.SRCFD)), session, message)
        elif session is None:
            self._refuse(identity, ErrorCode.INVALID_ARGUMENT, "there is no session: send Hello first")
        else:
            self._accept(session, message)

    def _accept(
        self, session: Session, message: AddRequest | Abort | Goodbye | GetTokenizer | GetStatistics | ResetPrefixCache
    ) -> None:
        match message:
            case AddRequest():
                self._add_request(session, message)
            case Goodbye():
                self._close(session)
            case GetTokenizer(call):
                self._send(session, msgspec.structs.replace(self._tokenizer, call=call))
            case Abort() | GetStatistics() | ResetPrefixCache():
                self._submit(session, message)

    def _submit(self, session: Session, message: EngineInput) -> None:
        self.inbox.put(session.client, message)

    def _add_request(self, session: Session, message: AddRequest) -> None:
        limits = self._welcome.limits
        if self._is_draining:
            self._fail(session, message.number, ErrorCode.UNAVAILABLE, "the engine takes no more requests: it stops")
        elif self.inbox.is_full:
            text = "too many requests wait for the engine; send again later"
            self._fail(session, message.number, ErrorCode.RESOURCE_EXHAUSTED, text)
        else:
            try:
                validate_request(message, vocab_size=self._welcome.vocab_size, max_model_len=limits.max_model_len)
            except InvalidRequestError as error:
                self._fail(session, message.number, ErrorCode.INVALID_ARGUMENT, str(error))
            else:
                self._submit(session, message)

    def _fail(self, session: Session, number: int, code: ErrorCode, text: str) -> None:
        self._send(session, RequestFailed(number, code, text))

    def _reject(self, identity: bytes, data: bytes, text: str) -> None:
        """A message that is not of this protocol. If it is a request with a readable number, that request fails."""
        self.num_malformed += 1
        session = self._sessions.of_identity(identity)
        number = None if session is None else decode_request_number(data)
        if session is not None and number is not None:
            self._fail(session, number, ErrorCode.INVALID_ARGUMENT, text)
        else:
            self._refuse(identity, ErrorCode.INVALID_ARGUMENT, text)
