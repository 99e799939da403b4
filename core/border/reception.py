"""Reception: the border's rules for messages from clients.

It decides which clients get a session, what is answered here, and what goes to the engine. A refusal costs the engine
thread nothing.
"""

import hmac
from collections.abc import Callable

import msgspec
import zmq

from core.border.accounts import Account, Load, load_of
from core.border.adapter_calls import AdapterCalls
from core.border.departure import Departure
from core.border.feature_shelf import FeatureShelf, NoFeatures, admitted, bytes_beside
from core.border.inbox import Inbox
from core.border.isolation import QUARANTINED_TEXT, Isolation
from core.border.key_use import KeyUse, KeyUses
from core.border.lease_clock import LeaseClock
from core.border.ledger import MAX_UNCONFIRMED, NumberStatus
from core.border.meter import RequestMeter
from core.border.pin_calls import owned, pin_call_refusal
from core.border.preparation import Preparation
from core.border.sessions import MAX_SESSIONS, Session, Sessions
from core.border.validation import decode_request_number, validate_request
from core.border.weight_calls import WeightCalls
from ipc.errors import InvalidRequestError, MalformedMessageError
from ipc.keys.quota import Quota
from ipc.log_lines import counted
from ipc.wire.feature_messages import PutFeature
from ipc.wire.lora_messages import ListLora, LoadLora, UnloadLora
from ipc.wire.messages import (
    CALLS,
    MAX_ABORTED,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    AddRequest,
    BeginDrain,
    CallDone,
    CallFailed,
    ClientCall,
    ErrorCode,
    GetModelInformation,
    GetTokenizer,
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    ModelInformation,
    Pause,
    Refused,
    RequestFailed,
    Resume,
    ServerMessage,
    Shutdown,
    Submission,
    TokenizerFiles,
    Welcome,
    decode_client_message,
)
from ipc.wire.metrics_messages import GetMetrics, Metrics
from ipc.wire.pin_messages import ForkPin, GetPins, ReleasePin
from ipc.wire.pooling_messages import AddPooling
from ipc.wire.start_messages import Isolate
from ipc.wire.weights_messages import Sleep, UpdateWeights, WakeUp

MAX_MALFORMED = 10  # this many malformed messages of one session ...
MALFORMED_S = 10.0  # ... within this many seconds end it
MAX_CALLS = 32  # unanswered calls per session
MAX_TOKENIZERS = 8  # times that one session may get it: each may be tens of megabytes
RETURN_S = 2.0  # after its Hello, a client may resend what it had for this long, even if the engine drains
_USER_ID = "User-Id"  # libzmq's name for what ZAP reports about a peer: the name of its key


class Served(msgspec.Struct, frozen=True):
    """The engine's answers about itself. Call number, session token and protocol minor are filled in for each client.

    owner_token: b"" = there is no owner. meter: None = requests are not measured.
    """

    welcome: Welcome
    tokenizer: TokenizerFiles
    model: ModelInformation
    owner_token: bytes = b""
    client_weights: dict[str, float] = {}
    meter: RequestMeter | None = None
    isolate: Isolate = Isolate()
    quota_of: Callable[[str], Quota] | None = None  # quota for the name of a key; None = clients have no keys
    features: FeatureShelf = NoFeatures()


class Reception:
    """The rules for received messages. Call it with the socket's lock held. now: monotonic seconds.

    on_connect: closes the sessions of connections that have ended. on_drain: refuses requests from now on and finishes
    the running ones. on_shutdown: ends the process.
    """

    def __init__(
        self,
        served: Served,
        sessions: Sessions,
        inbox: Inbox,
        clock: LeaseClock,
        *,
        preparation: Preparation | None = None,
        adapters: AdapterCalls,
        weights: WeightCalls,
        isolation: Isolation,
        departure: Departure,
        on_connect: Callable[[], None],
        on_drain: Callable[[], None],
        on_shutdown: Callable[[], None],
    ) -> None:
        self.is_draining = False
        self._is_paused = False  # by the owner
        self.num_malformed = 0  # messages that do not follow this protocol
        self._served = served
        self._limits = served.welcome.limits
        self._meter = served.meter
        self._sessions = sessions
        self._inbox = inbox
        self._clock = clock
        self._preparation = preparation  # None: no request needs preparation
        self._room = Room(self._limits, sessions, inbox)
        self._adapters, self._weights = adapters, weights
        self._features = served.features
        self._restorable = Restorable(self._limits)
        self._key_uses = None if served.quota_of is None else KeyUses(served.quota_of)
        self._isolation = isolation
        self._departure = departure
        self._on_connect = on_connect
        self._on_drain = on_drain
        self._on_shutdown = on_shutdown

    def receive(self, identity: bytes, frame: zmq.Frame, num_frames: int, now: float) -> None:
        """Handle one message. frame: the first one after the identity, which every message on a ROUTER has."""
        session = self._sessions.of_identity(identity)
        if session is not None:
            session.seen = self._clock.time
        if num_frames != 1:
            self._reject(identity, session, b"", f"a message must be one frame, this one has {num_frames}", now)
            return
        try:
            message = decode_client_message(frame.buffer)
        except MalformedMessageError as error:
            self._reject(identity, session, frame.buffer, str(error), now)
            return
        if isinstance(message, Hello):
            self._hello(identity, frame, session, message, now)
        elif session is None:
            self._refuse(identity, ErrorCode.INVALID_ARGUMENT, "there is no session: send Hello first")
        else:
            self._accept(session, message, frame, now)

    # --- sessions ---

    def _hello(self, identity: bytes, frame: zmq.Frame, session: Session | None, hello: Hello, now: float) -> None:
        ours = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
        welcome = self._served.welcome
        if hello.major != PROTOCOL_MAJOR:
            text = (
                f"the engine uses protocol {ours}, the client {hello.major}.{hello.minor}: "
                f"use the same release of engine-core on both sides (the engine's is {welcome.server_version})"
            )
            self._refuse(identity, ErrorCode.VERSION_MISMATCH, text)
            return
        if self.is_draining:
            self._refuse(identity, ErrorCode.UNAVAILABLE, "the engine is finishing its last requests and then stops")
            return
        for lost in self._sessions.of_token(hello.session_token):
            if lost is not session:
                self._sessions.lose(lost)  # its connection was cut, and so far only the client has noticed
        if session is None and len(self._sessions) >= MAX_SESSIONS:
            text = f"the engine has {counted(len(self._sessions), 'client')}, which is its limit; try again later"
            self._refuse(identity, ErrorCode.RESOURCE_EXHAUSTED, text)
            return
        if session is None:
            session = self._open(identity, int(frame.get(zmq.SRCFD)), hello)
            if self._key_uses is not None and (key := str(frame.get(_USER_ID))):
                session.use = self._key_uses.of(key, now)
            session.returning_until = now + RETURN_S
            session.resumable = self._sessions.resumable_after(hello.session_token)
            if not session.resumable:  # the requests of another engine, which may be dead
                session.num_restorable = self._restorable.grant(hello.num_resumed)
        self._sessions.send(session, self._welcome(session, hello), now)

    def _open(self, identity: bytes, fd: int, hello: Hello) -> Session:
        self._on_connect()  # the kernel may have given this client the fd of one that has left
        token = self._served.owner_token
        is_owner = bool(token) and hmac.compare_digest(token, hello.owner_token)
        return self._sessions.open(
            identity,
            fd,
            hello.client_name,
            is_owner=is_owner,
            has_lease=not is_owner,  # the owner's lease is its pipe
            lease_time=self._clock.time,
        )

    def _welcome(self, session: Session, hello: Hello) -> Welcome:
        limits = self._limits
        if not session.has_lease:
            limits = msgspec.structs.replace(limits, heartbeat_ms=0, lease_ms=0)
        minor = max(0, min(PROTOCOL_MINOR, hello.minor))
        own = {"minor": minor, "session_token": session.token, "limits": limits, "weights": self._weights.mark}
        return msgspec.structs.replace(self._served.welcome, **own)

    # --- what sessions send ---

    def _accept(
        self,
        session: Session,
        message: Submission | PutFeature | Abort | Goodbye | Heartbeat | ClientCall,
        frame: zmq.Frame,
        now: float,
    ) -> None:
        match message:
            case AddRequest() | AddPooling():
                refusal = self._admit(session, message, frame, now)
                if self._meter is not None:
                    self._meter.note_request(session.client, message, refusal, now)
                if refusal is not None:
                    self._sessions.send(session, refusal, now)
            case PutFeature():
                self._features.put(session.client, message)
            case Abort():
                self._abort(session, message, now)
            case Goodbye():
                self._sessions.close(session)
            case Heartbeat():
                pass
            case _:
                answer = self._call(session, message, now)
                if answer is not None:
                    self._sessions.send(session, answer, now)
                if isinstance(message, Shutdown) and session.is_owner:
                    self._on_shutdown()

    def _call(self, session: Session, message: ClientCall, now: float) -> ServerMessage | None:
        """Return the answer to a call, or None if the engine answers it."""
        if CALLS[type(message)].is_owners and not session.is_owner:
            text = "only the owner, which started this engine, may do this (control: --owner-file)"
            return CallFailed(message.call, ErrorCode.PERMISSION_DENIED, text)
        match message:
            case GetTokenizer(call):
                session.num_tokenizers += 1
                if session.num_tokenizers > MAX_TOKENIZERS:
                    text = f"this session has received the tokenizer {MAX_TOKENIZERS} times already"
                    return CallFailed(call, ErrorCode.RESOURCE_EXHAUSTED, text)
                return msgspec.structs.replace(self._served.tokenizer, call=call)
            case GetModelInformation(call):
                return msgspec.structs.replace(self._served.model, call=call, not_taking=self._not_taking)
            case BeginDrain(call, comes_back=True) if not self._limits.resume_ms:
                text = "this engine will not be restarted: it has no supervisor, or one without restarts"
                return CallFailed(call, ErrorCode.INVALID_ARGUMENT, text)
            case GetMetrics(call):
                return Metrics(call, False) if self._meter is None else self._meter.metrics(call, len(self._sessions))
            case BeginDrain(call):
                self._departure.ask(message, now)
                self._on_drain()
                return CallDone(call)
            case Shutdown(call):
                return CallDone(call)
            case UnloadLora() | ListLora():
                return self._adapters.answer(session.client, message, is_owner=session.is_owner)
            case _ if session.num_calls >= MAX_CALLS:
                text = f"{MAX_CALLS} calls of this session are unanswered; call again after their answers"
                return CallFailed(message.call, ErrorCode.RESOURCE_EXHAUSTED, text)
            case LoadLora():
                answer = self._adapters.answer(session.client, message, is_owner=session.is_owner)
                session.num_calls += answer is None  # until its answer arrives
                return answer
            case UpdateWeights():
                refusal = self._weights.begin(session.client, message)
                session.num_calls += refusal is None  # until its answer arrives
                return refusal
            case Sleep() | WakeUp() if (failed := self._weights.refusal(message)) is not None:
                return failed
            case ReleasePin() | ForkPin() | GetPins() if (failed := pin_call_refusal(message)) is not None:
                return failed
            case _:
                if isinstance(message, Pause | Resume):
                    self._is_paused = isinstance(message, Pause)
                session.num_calls += 1
                self._inbox.put(session.client, owned(message, session.use))
                return None

    @property
    def _not_taking(self) -> str:
        """Return why new requests are refused or do not start; "" if they are accepted."""
        if self.is_draining and not self._departure.comes_back:
            return "the engine accepts no more requests: it is stopping"
        return "the engine's owner has paused it" if self._is_paused and not self.is_draining else ""

    def _abort(self, session: Session, message: Abort, now: float) -> None:
        num_numbers = len(message.numbers) // 4
        if num_numbers > MAX_ABORTED:
            text = f"an Abort may have at most {MAX_ABORTED} numbers, this one has {num_numbers}"
            self._reject(session.identity, session, b"", text, now)
        elif (abort := session.requests.live_among(message)) is not None:
            rest: Abort | None = abort
            for waiting in (self._isolation, self._preparation):
                if waiting is None or rest is None:
                    continue
                rest, last = waiting.abort(session.client, rest)
                if last is not None:
                    session.requests.note(last)
                    self._sessions.send(session, last, now)
            if rest is not None:
                self._inbox.put_abort(session.client, rest)

    def _admit(self, session: Session, message: Submission, frame: zmq.Frame, now: float) -> RequestFailed | None:
        """Put a request into the inbox, or return its refusal.

        A request that is already running is not started again.
        """
        number = message.number
        status = session.requests.status(number, frame.buffer)
        if status is NumberStatus.SAME:
            return None
        if status is not NumberStatus.NEW:
            text = f"request number {number} is {status.value} in this session; numbers are never reused"
            return RequestFailed(number, ErrorCode.ALREADY_EXISTS, text)
        was_here = number in session.resumable
        is_resumed = was_here or session.num_restorable > 0
        if self.is_draining and not (is_resumed and session.returning_until > now):
            if self._departure.comes_back:
                return None  # not accepted: its client will send it again, to the next engine
            return RequestFailed(number, ErrorCode.UNAVAILABLE, "the engine accepts no more requests: it is stopping")
        num_bytes = len(frame.buffer) + bytes_beside(self._features, message)
        load, use = load_of(message, num_bytes), self._use_of(session, now)
        tenant = message.tenant if use is None else use.tenant(message.tenant)
        if not is_resumed:
            refusal = None if use is None else use.refusal(message, now)
            refusal = refusal or self._room.refusal(message, load, session.requests.account, tenant)
            if refusal is not None:
                return refusal
        session.resumable.discard(number)
        session.num_restorable -= session.num_restorable > 0
        if (refusal := self._what_is_wrong(message, is_resumed=is_resumed)) is not None:
            return refusal
        try:
            message = admitted(self._features, session.client, message)
        except InvalidRequestError as error:
            return RequestFailed(number, ErrorCode.INVALID_ARGUMENT, str(error))
        accounts = [self._sessions.tenant(tenant)] if tenant else []
        if use is not None:
            accounts.append(use.account)
            message = msgspec.structs.replace(message, tenant=tenant)
            if not was_here:  # otherwise it was counted then
                use.take(message, now)
        session.requests.add(number, frame.buffer, load, *accounts)
        if self._isolation.is_parked(message):
            self._isolation.park(session.client, message, now)
        else:
            self.begin(session.client, message, is_resumed=is_resumed)
        return None

    def _use_of(self, session: Session, now: float) -> KeyUse | None:
        """Return the use of the session's key under its current quota, or None if it has no key."""
        if session.use is None or self._key_uses is None:
            return None
        return self._key_uses.of(session.use.name, now)

    def _what_is_wrong(self, message: Submission, *, is_resumed: bool) -> RequestFailed | None:
        """Return why this request must not run, although there is room for it, or None."""
        number, preparation = message.number, self._preparation
        try:
            validate_request(
                message,
                vocab_size=self._served.welcome.vocab_size,
                max_model_len=self._limits.max_model_len,
                max_logprobs=self._limits.max_logprobs,
                tasks=self._served.welcome.tasks,
            )
            if message.adapter is not None:
                self._adapters.check(message.adapter)
        except InvalidRequestError as error:
            return RequestFailed(number, ErrorCode.INVALID_ARGUMENT, str(error))
        if self._isolation.is_quarantined(message):
            return RequestFailed(number, ErrorCode.QUARANTINED, QUARANTINED_TEXT)
        if preparation is not None and preparation.needs(message) and preparation.is_full and not is_resumed:
            text = f"{counted(len(preparation), 'request is', 'requests are')} being prepared; send again later"
            return RequestFailed(number, ErrorCode.RESOURCE_EXHAUSTED, text, RETRY_AFTER_MS)
        return None

    def begin(self, client: int, message: Submission, *, is_resumed: bool = False) -> None:
        """Pass an accepted request on: to preparation if it needs any, otherwise into the inbox."""
        if self._preparation is not None and self._preparation.needs(message):
            self._preparation.begin(client, message, is_free=is_resumed)
        else:
            self._inbox.put(client, message)

    # --- malformed messages ---

    def _reject(
        self, identity: bytes, session: Session | None, data: bytes | memoryview, text: str, now: float
    ) -> None:
        """Fail the request of a malformed message if its number can be read; otherwise report the error to the sender.

        After MAX_MALFORMED messages without a readable number, the session ends.
        """
        self.num_malformed += 1
        number = None if session is None else decode_request_number(data)
        if session is None:
            self._refuse(identity, ErrorCode.INVALID_ARGUMENT, text)
        elif number is not None:
            self._sessions.send(session, RequestFailed(number, ErrorCode.INVALID_ARGUMENT, text), now)
        else:
            session.malformed.append(now)
            while now - session.malformed[0] > MALFORMED_S:
                session.malformed.popleft()
            if len(session.malformed) >= MAX_MALFORMED:
                text = f"{MAX_MALFORMED} malformed messages within {MALFORMED_S:g} s; the last: {text}"
                self._sessions.end(session, ErrorCode.INVALID_ARGUMENT, text)
            else:
                self._sessions.send(session, Refused(ErrorCode.INVALID_ARGUMENT, text), now)

    def _refuse(self, identity: bytes, code: ErrorCode, text: str) -> None:
        self._sessions.send_to_stranger(identity, Refused(code, text))


# Restorable: how many requests of a dead engine's clients this engine accepts without checking its limits.


class Restorable:
    """One pool for all clients. Requests accepted once are never refused by a limit, and no client can take more.

    An engine accepts as many requests as its limits allow. Its clients may resend up to twice as many, plus some whose
    ends were on the way, because requests that ran are counted in addition to a full queue. Requests beyond that are
    treated as new ones.
    """

    def __init__(self, limits: Limits) -> None:
        self._num_left = 2 * (limits.max_num_seqs + limits.max_num_queued_requests) + MAX_UNCONFIRMED

    def grant(self, num_resumed: int) -> int:
        """Take up to num_resumed requests from the pool for a session, and return how many.

        A negative number counts as 0.
        """
        num_granted = min(max(0, num_resumed), self._num_left)
        self._num_left -= num_granted
        return num_granted


# Room: whether the engine has room for a new request: its limits, and each client's and tenant's share.


RETRY_AFTER_MS = 1000


class Room:
    """The limits of one engine. Call it with the socket's lock held."""

    def __init__(self, limits: Limits, sessions: Sessions, inbox: Inbox) -> None:
        self._limits = limits
        self._sessions = sessions
        self._inbox = inbox

    def refusal(self, message: Submission, load: Load, account: Account, tenant: str) -> RequestFailed | None:
        """Return the refusal of a new request, or None if there is room.

        account: the client's. tenant: "" = none.
        """
        full = self._bound_beyond(load, account, tenant)
        if not full:
            return None
        text = f"{full}; send again later"
        return RequestFailed(message.number, ErrorCode.RESOURCE_EXHAUSTED, text, RETRY_AFTER_MS)

    def _bound_beyond(self, load: Load, account: Account, tenant: str) -> str:
        """Return the limit that the request would exceed, or "". A request that is alone in a queue always fits."""
        limits = self._limits
        if account.num_bytes > 0 and account.num_bytes + load.num_bytes > limits.max_client_bytes:
            return (
                f"this client's unfinished requests use {account.num_bytes} bytes of memory, this one needs "
                f"{load.num_bytes}, and max_client_bytes is {limits.max_client_bytes}"
            )
        queued, tokens = self._inbox.num_queued_requests, self._inbox.num_queued_tokens
        num_left, tokens_left = limits.max_num_queued_requests - queued, limits.max_num_queued_tokens - tokens
        if num_left <= 0:
            return f"{counted(queued, 'request is', 'requests are')} waiting to start, which is max_num_queued_requests"
        if tokens > 0 and load.num_tokens > tokens_left:
            waiting = f"{counted(tokens, 'token is', 'tokens are')} waiting to start"
            return f"{waiting}, and max_num_queued_tokens is {limits.max_num_queued_tokens}"
        full = self._beyond_share("this client's", account, load, num_left, tokens_left)
        if tenant and not full:  # half of that, so that other tenants of the same client also find room
            account = self._sessions.tenant(tenant)
            num_left += limits.max_num_seqs - account.num_queued
            tokens_left += limits.max_model_len - account.num_queued_tokens
            full = self._beyond_share("this tenant's", account, load, num_left, tokens_left)
        return full

    def _beyond_share(self, whose: str, account: Account, load: Load, num_left: int, tokens_left: int) -> str:
        """Return why the request exceeds a share of what is left, or "" if it does not."""
        if account.num_queued >= max(0, num_left) + self._limits.max_num_seqs:
            waiting, left = f"{account.num_queued} of the requests", f"{num_left} places"
        elif account.num_queued_tokens + load.num_tokens > max(0, tokens_left) + self._limits.max_model_len:
            waiting, left = f"{account.num_queued_tokens} of the tokens", f"{tokens_left}"
        else:
            return ""
        return f"{waiting} that are waiting to start are {whose}, and the last {left} are reserved for others"
