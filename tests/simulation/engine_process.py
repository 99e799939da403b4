"""EngineProcess: the pure core and the border under the world's clock, put together as core/border/io_thread.py and
core/process/loop.py do it with threads."""

from collections.abc import Callable, Sequence
from functools import partial

from core.border.socket_rounds import AddressedMessage, Border
from core.engine import EngineCore
from core.inputs import HoldClient, ReleaseClient, StoreNews
from ipc.options.config import EngineConfig
from ipc.wire.messages import EngineStopping
from tests.core.driving import PagedExecutor
from tests.core.hostile_drafts import KINDS, fake_oracle, use
from tests.core.stateful_executor import StatefulExecutor
from tests.simulation.block_shelf import BlockShelf, PlayedStore
from tests.simulation.engine_parts import FailingExecutor, StepFailure, ready_executor, served
from tests.simulation.network import Router
from tests.simulation.world import MS, World

_HELD_NS = 100 * MS  # core/process/loop.py's
_STEPS_PER_CHECK = 8
_SENT_BY_ENGINE = 2  # core/border/io_thread.py's


class EngineProcess:
    """An engine that can be stopped and killed. is_paged: the executor reads every context back from its blocks, and
    gives no log probabilities. poison: a token after which a request fails, for such an executor. shelf: where
    the blocks and states of an engine with recurrent layers go. on_drain, on_death: called when the engine begins to
    drain, and when it has ended."""

    store: PlayedStore | None = None

    def __init__(
        self,
        world: World,
        config: EngineConfig,
        *,
        generation: int,
        lease_ms: int,
        capacity: int,
        is_paged: bool,
        poison: int | None,
        shelf: BlockShelf | None = None,
        on_drain: Callable[[], None],
        on_death: Callable[[], None],
    ) -> None:
        self._world = world
        self._on_drain = on_drain
        self._on_death = on_death
        self.router = Router(world, capacity, self._read_soon, self._wake_late)
        stateful = None if shelf is None else StatefulExecutor(config, poison)
        paged = stateful or (PagedExecutor(config, poison) if is_paged else ready_executor(config))
        self.executor = FailingExecutor(paged)
        self.core = EngineCore(config, self.executor, generation)  # type: ignore[arg-type]
        if shelf is not None and stateful is not None:
            self.store = PlayedStore(world, self.core, stateful, shelf, self._tell)
        if config.speculative_config is not None:
            vocab_size = self.executor.info.vocab_size
            use(self.core.scheduler, world.random.choice(KINDS), partial(fake_oracle, vocab_size), vocab_size)
        self.border = Border(
            self.router,  # type: ignore[arg-type]
            self.router,  # type: ignore[arg-type]
            served(config, self.executor.info, generation, lease_ms),
            world.seconds(),
            on_drain=self.drain,
            on_shutdown=lambda: None,
        )
        self.border.sessions.has_read_all = lambda fd: True
        self.is_dead = False
        self.stopped_until_ns = 0
        self._round_at_ns: int | None = None  # when the next round is due
        self._is_stepping = False  # a step is under way, or due; else the engine thread reads the socket
        self._is_reading = False  # the engine thread is about to
        self._num_steps = 0
        world.engine = self

    # --- what can be done to it ---

    def stop_for(self, duration_ns: int) -> None:
        """Stop the process, and let it go on after so long, as SIGSTOP and SIGCONT do."""
        self.stopped_until_ns = max(self.stopped_until_ns, self._world.now_ns + duration_ns)

    def drain(self) -> None:
        self._on_drain()
        self.border.drain_asked = True
        self.wake()

    def kill(self, *, loses_frames: bool) -> None:
        if not self.is_dead:
            self.is_dead = True
            self._world.engine = None
            self._world.note("the engine is dead")
            if self.store is not None:
                self.store.is_dead = True
            self.router.close(loses_frames=loses_frames)
            self._on_death()

    @property
    def is_stopped(self) -> bool:
        return self._world.now_ns < self.stopped_until_ns

    # --- the IO thread ---

    def wake(self) -> None:
        self._round_later(self._world.now_ns + self._world.delay() // 8)

    def _wake_late(self) -> None:
        """Wake the IO thread for an event of the monitor; the engine thread may read later messages before that."""
        self._round_later(self._world.now_ns + self._world.random.randrange(self._world.max_delay_ns))

    def answer_now(self) -> bool:
        """Read and answer all that has arrived; False where the engine cannot."""
        while not (self.is_dead or self.is_stopped or self.border.inbox.is_overfull or self.border.shutdown_asked):
            if self._is_stepping:
                self._round()
            else:
                self._read()
            if not self.border.has_unread:
                return True
        return False

    def _round_later(self, time_ns: int) -> None:
        if self._round_at_ns is None or time_ns < self._round_at_ns:
            self._round_at_ns = time_ns
            self._world.at(time_ns, self._round_if_due)

    def _round_if_due(self) -> None:
        if self.is_dead or self._round_at_ns is None or self._round_at_ns > self._world.now_ns:
            return  # there was a sooner round in its place
        self._round_at_ns = None
        if self.is_stopped:
            self._round_later(self.stopped_until_ns)
        else:
            self._round()

    def _round(self) -> None:
        due_s = self.border.round(self._world.seconds())
        if self.border.shutdown_asked:
            self._stop("its owner has shut it down")
            return
        if due_s is not None:
            self._round_later(self._world.now_ns + int(due_s * 1e9))
        if not self.border.inbox.is_empty:
            self._step_later(self._world.delay() // 8)

    def _stop(self, error: str) -> None:
        """Tell all sessions, and end."""
        while not self.border.outbox.empty():
            self.border.round(self._world.seconds())
        self.border.send_to_all(EngineStopping(error), self._world.seconds())
        self.kill(loses_frames=False)

    # --- the engine thread ---

    def _read_soon(self) -> None:
        """Wake the engine thread for a message where that thread has nothing to run, else the IO thread."""
        if self._is_stepping:
            self.wake()
        elif not self._is_reading:
            self._is_reading = True
            self._world.after(self._world.delay() // 8, self._read_in_time)

    def _read_in_time(self) -> None:
        if self.is_dead:
            return
        if self.is_stopped:
            self._world.at(self.stopped_until_ns, self._read_in_time)
            return
        self._is_reading = False
        self._read()

    def _read(self) -> None:
        has_read = self.border.receive(self._world.seconds())
        due_s = self.border.due_s(may_receive=has_read)
        if self.border.shutdown_asked:
            self.wake()
        elif due_s is not None:
            self._round_later(self._world.now_ns + int(due_s * 1e9))
        if not self.border.inbox.is_empty:
            self._step_later(0)

    def _step_later(self, delay_ns: int) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self._world.after(delay_ns, self._step)

    def _step(self) -> None:
        if self.is_dead:
            return
        if self.is_stopped:
            self._world.at(self.stopped_until_ns, self._step)
            return
        self._is_stepping = False
        core, inbox = self.core, self.border.inbox
        messages = inbox.drain()
        if not messages and not core.has_unfinished:
            if inbox.has_ended:
                self._stop("")
            return
        for client, message in messages:
            self._world.note("engine: step with {} of session {}", type(message).__name__, client)
            if isinstance(message, (HoldClient, ReleaseClient)):
                self._world.count(type(message).__name__)
        try:
            outputs = core.step(messages, self._world.now_ns)
        except StepFailure as error:
            self._stop(f"StepFailure: {error}")
            return
        if self.store is not None:
            self.store.put(core.take_orders())
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_CHECK == 0:
            self._check_core()
        self._is_stepping = True
        duration_ns = self._world.max_delay_ns // 4 + self._world.delay()
        self._world.after(duration_ns, partial(self._end_step, outputs))

    def _tell(self, news: StoreNews) -> None:
        self.border.inbox.put_news(0, news)
        self._step_later(0)

    def _check_core(self) -> None:
        self.core.scheduler.check_integrity()

    def _end_step(self, outputs: Sequence[AddressedMessage]) -> None:
        if self.is_dead:
            return
        if self.is_stopped:
            self._world.at(self.stopped_until_ns, partial(self._end_step, outputs))
            return
        self._is_stepping = False
        border, core = self.border, self.core
        border.inbox.settle(*core.count_waiting())
        if outputs and len(outputs) <= _SENT_BY_ENGINE and border.outbox.empty() and self._world.chance(0.5):
            border.send(outputs, self._world.seconds())
            if border.sessions.has_unsent:
                self.wake()
        elif outputs:
            border.outbox.put(outputs)
            self.wake()
        if core.has_work or not border.inbox.is_empty:
            self._step_later(0)
        elif core.has_unfinished:
            self._world.after(_HELD_NS, partial(self._step_later, 0))
        elif border.inbox.has_ended:
            self._step_later(0)

    # --- what is left ---

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is on its way inside the process."""
        inbox = self.border.inbox
        return (
            not self.core.has_unfinished
            and not self._is_stepping
            and inbox.is_empty
            and self.border.outbox.empty()
            and not self.border.sessions.has_unsent
            and (self.store is None or self.store.is_idle)
        )
