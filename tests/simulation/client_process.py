"""ClientProcess: a program that follows its plan with real EngineClients, one after the other; it may be stopped, cut
off and killed."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from frontend.client.client import EngineClient
from ipc.errors import CallFailedError, EngineDeadError, HandshakeError
from ipc.wire.messages import PauseMode
from tests.simulation.engine_parts import OWNER_TOKEN
from tests.simulation.engine_process import EngineProcess
from tests.simulation.follower import Follower
from tests.simulation.network import Connection
from tests.simulation.oracle import Excuse, Rules, Stream, check_error, undisturbed
from tests.simulation.plan import Abort, Action, Call, Connect, Discard, Leave, Plan, Submit
from tests.simulation.reader import Reader, Submitted
from tests.simulation.transport import PlayedTransport
from tests.simulation.world import MS, Failure, World

_RETRY_NS = 20 * MS
_MAX_RETRIES = 1000
_PAUSE_NS = 10 * MS

_CALLS: dict[Call, Callable[[EngineClient], object]] = {
    Call.STATISTICS: EngineClient.statistics,
    Call.EXPLAIN: EngineClient.explain,
    Call.RESET_PREFIX_CACHE: EngineClient.reset_prefix_cache,
    Call.PAUSE_NEW: lambda client: client.pause(PauseMode.NEW),
    Call.PAUSE_ALL: lambda client: client.pause(PauseMode.ALL),
    Call.RESUME: EngineClient.resume,
    Call.DRAIN: EngineClient.drain,
    Call.SHUTDOWN: EngineClient.shutdown,
}


class ClientProcess:
    """A program, and the process that it runs in. rules: the engine's. always: excuses that every client has."""

    def __init__(self, world: World, plan: Plan, rules: Rules, always: set[Excuse]) -> None:
        self.plan = plan
        self.excuses = set(always)  # since the present client connected
        self._always = always
        self.client: EngineClient | None = None
        self.is_killed = False
        self._world = world
        self._rules = rules
        self._stopped_until_ns = 0
        self._transport: PlayedTransport | None = None
        self._reader = Reader(world)  # of the present client
        self._follower: Follower | None = None
        self._numbers: dict[int, int] = {}  # of the present client's requests, by index of their ask
        self._num_left = len(plan.actions)
        self._num_retries = 0
        for time_ns, action in plan.actions:
            world.after(time_ns, partial(self.when_running, partial(self._act, action)))

    # --- what can be done to it ---

    def stop_for(self, duration_ns: int) -> None:
        """Stop the process, and let it go on after so long, as SIGSTOP and SIGCONT do."""
        self._stopped_until_ns = max(self._stopped_until_ns, self._world.now_ns + duration_ns)
        self.excuses.add(Excuse.STOPPED)

    def make_slow(self, duration_ns: int) -> None:
        """Delay what the engine sends."""
        if self.is_connected:
            self._connection.slow_until_ns = self._world.now_ns + duration_ns
            self.excuses.add(Excuse.SLOW)

    def cut(self, engine_notices_ns: int, client_notices_ns: int) -> None:
        """Cut the connection; each side notices after so long."""
        if self.is_connected:
            self.excuses.add(Excuse.CUT_AGAIN if Excuse.CUT in self.excuses else Excuse.CUT)
            self._connection.cut(engine_notices_ns, client_notices_ns)

    def kill(self, vanishes_ns: int | None) -> None:
        """Kill the process. vanishes_ns: the engine notices after so long; None = the kernel closes the connection."""
        self.is_killed = True
        if self._transport is not None and self._transport.connection is not None:
            if vanishes_ns is None:
                self._transport.close()
            else:
                self._transport.connection.vanish(vanishes_ns)
                self._transport.close()

    @property
    def is_connected(self) -> bool:
        return not self.is_killed and self._transport is not None and self._transport.connection is not None

    @property
    def _connection(self) -> Connection:
        assert self._transport is not None
        assert self._transport.connection is not None
        return self._transport.connection

    def when_running(self, do: "partial[None]") -> None:
        """Call it now, or when the process goes on; never where it was killed."""
        if self.is_killed:
            return
        if self._world.now_ns < self._stopped_until_ns:
            self._world.at(self._stopped_until_ns, partial(self.when_running, do))
        else:
            do()

    def describe(self) -> str:
        """Say what is unfinished, for the message of a failure."""
        unfinished = [stream.name for stream in self._reader.streams if not stream.is_over]
        return f"{self._num_left} actions left, unfinished: {unfinished}"

    def has_copy_of(self, engine: EngineProcess) -> bool:
        """Whether its copy of the idle engine's prefix cache, if it keeps one, is complete. Errors: Failure where it is
        complete and wrong."""
        if not self.has_session or self._follower is None:
            return True
        return self.is_connected and not self._connection.num_waiting and self._follower.check_against(engine)

    # --- the program ---

    @property
    def is_done(self) -> bool:
        """Whether the plan is carried out and the end of every request is known."""
        return self.is_killed or (self._num_left == 0 and self._reader.is_over)

    @property
    def is_busy(self) -> bool:
        """Whether a request has begun and has not ended."""
        return any(stream.tokens and not stream.is_over for stream in self._reader.streams)

    @property
    def has_session(self) -> bool:
        return not self.is_killed and self.client is not None and self.client.error is None

    def _act(self, action: Action) -> None:
        if not isinstance(action, Leave) and not self._has_client():
            self._num_retries += 1
            if self._num_retries > _MAX_RETRIES:
                raise Failure(f"{self.plan.name} finds no engine")
            self._world.after(_RETRY_NS, partial(self.when_running, partial(self._act, action)))
            return
        self._world.note("{}: {}", self.plan.name, action)
        with suppress(EngineDeadError):  # it ends meanwhile, which the listener is told too
            match action:
                case Submit(ask):
                    self._submit(ask)
                case Abort(ask, choices):
                    self._abort(ask, choices)
                case Discard(ask):
                    self._discard(ask)
                case Leave():
                    self.leave()
                case Connect():
                    pass
                case Call():
                    self._call(action)
        self._num_left -= 1

    def _has_client(self) -> bool:
        """Make a new client where there is none with an open session; whether there is one now."""
        if self.has_session:
            return True
        self._bury()
        transport = PlayedTransport(self._world, self, is_tcp=self.plan.is_tcp, grace_ns=self.plan.grace_ns)
        try:
            client = EngineClient(
                transport,
                name=self.plan.name,
                owner_token=OWNER_TOKEN if self.plan.is_owner else b"",
                hello_timeout=0.0,
                call_timeout=0.0,
                clock=self._world.seconds,
            )
        except (EngineDeadError, HandshakeError) as error:
            engine = self._world.engine
            if transport.was_heard and engine is not None and not engine.border.drain_asked:
                raise Failure(f"{self.plan.name} cannot connect to an engine that runs: {error!r}") from error
            return False
        assert self._world.engine is not None
        drained = {Excuse.DRAINED} if self._world.engine.border.drain_asked else set()
        self.excuses = self._always | drained
        self.client, self._transport = client, transport
        self._world.note("{}: connected", self.plan.name)
        client.add_listener(partial(self._hear, client))
        if self.plan.follows:
            self._follower = Follower(self._world, self, client, self.plan.name)
        return True

    def _submit(self, index: int) -> None:
        assert self.client is not None
        ask = self.plan.asks[index]
        number = self.client.submit(
            ask.prompt,
            ask.params,
            seed=ask.seed,
            priority=ask.priority,
            cache_salt=ask.cache_salt,
            deadline_ms=ask.deadline_ms,
            streaming=ask.streaming,
            pins=ask.pins,
        )
        names = [f"request {number}.{choice} of {self.plan.name}" for choice in range(ask.params.n)]
        streams = [Stream(name, undisturbed(ask, choice, self._rules)) for choice, name in enumerate(names)]
        self._reader.requests[number] = Submitted(ask, streams, self._world.now_ns)
        self._numbers[index] = number

    def _abort(self, index: int, choices: list[int]) -> None:
        number = self._numbers.get(index, -1)
        one = self._reader.requests.get(number)
        if one is None or self.client is None:
            return
        for choice in choices or range(len(one.streams)):
            one.streams[choice].aborted = True
        self.client.abort([number] * max(1, len(choices)), choices)
        self._world.count("abort")

    def _discard(self, index: int) -> None:
        number = self._numbers.get(index, -1)
        if self._reader.requests.pop(number, None) is not None and self.client is not None:
            self.client.discard([number])

    def _call(self, call: Call) -> None:
        assert self.client is not None
        if call in (Call.PAUSE_NEW, Call.PAUSE_ALL):
            self._num_left += 1
            self._world.after(_PAUSE_NS, partial(self.when_running, partial(self._act, Call.RESUME)))
        with suppress(CallFailedError):
            _CALLS[call](self.client)

    # --- reading ---

    def _hear(self, client: EngineClient) -> None:
        """Look at the news, or at the end, now or later; the listener of a client."""
        look = partial(self.when_running, partial(self._look, client))
        if client.error is not None or self._world.chance(0.2):
            self._world.after(self._world.delay(), look)
        else:
            look()

    def _look(self, client: EngineClient) -> None:
        if client is not self.client:
            return
        if client.error is not None:
            self._bury()
            return
        for number in client.take_ready().tolist():
            self._reader.read(client, number, self.excuses)

    def _bury(self) -> None:
        """Read what came before the session's end, check the reason, and forget the client."""
        client, self.client = self.client, None
        if client is None:
            return
        assert client.error is not None
        self._world.note("{}: the session ended: {!r}", self.plan.name, client.error)
        self._world.count(check_error(client.error, self.excuses))
        for number in self._reader.requests:
            self._reader.read(client, number, self.excuses)
        self._forget(client)

    def leave(self) -> None:
        """Say goodbye, with requests unfinished or not."""
        client, self.client = self.client, None
        if client is not None:
            self._forget(client)

    def _forget(self, client: EngineClient) -> None:
        client.close()
        client.discard(self._reader.requests)
        if client.num_live:
            raise Failure(f"{client.num_live} requests are left in the journal of {self.plan.name}")
        self._reader = Reader(self._world)
        self._numbers.clear()
        self._follower = None
