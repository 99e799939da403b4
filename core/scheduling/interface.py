"""SchedulerInterface: what the engine asks of a scheduler. docs/schedulers.md is for people who write one.

The engine, the recorder and the tools use these names only. core/scheduling/scheduler.py is the built-in scheduler.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from core.batch.batch import Batch
from core.batch.request import Request
from core.batch.table import BatchTable
from core.execution.executor import ModelInfo
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.kv.block_pool import BlockPool
from core.scheduling.block_exchange import BlockExchange
from core.scheduling.outputs import ClientOutput
from core.scheduling.stats import SchedulerStats
from core.scheduling.waiting_queue import WaitingQueue
from core.scheduling.weight_update import WeightUpdate
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import AnyInts, Ints, Rows, TokenIds
from ipc.wire.messages import PauseMode, Statistics
from ipc.wire.weights_messages import WeightsMark

#: The version of engine_core.schedulers: the major number changes if schedulers break, the minor one if something is
#: added.
SCHEDULER_API = (1, 0)


class SchedulerInterface(Protocol):
    """Decides which tokens of which requests run in the next step.

    A scheduler is a pure function of its calls: it has no clock (times are passed in ns), no randomness, no sockets and
    no tensors, and it depends on no order of a set. So a capture replays to the same decisions. It never decides about
    tokens: at numerics level L2 they are the same under every scheduler.

    batch holds the running requests, their rows and KV blocks; table and pool are its parts. waiting holds all others.
    stats has the counters. The recorder and the tools read these. exchange: None, unless the scheduler asks a store of
    KV blocks beyond the host. weights: which weights are in use, and the update of them that waits.
    """

    batch: Batch
    table: BatchTable
    pool: BlockPool
    waiting: WaitingQueue
    stats: SchedulerStats
    exchange: BlockExchange | None
    weights: WeightUpdate

    # --- requests ---

    def add_request(self, choices: list[Request], now_ns: int, deadline_ns: int = 0) -> None:
        """Queue the choices of one valid message. A request that could never run is refused through take_outputs().

        deadline_ns: on the clock of now_ns; 0 = none.
        """

    def finish_requests(self, client: int, numbers: list[int], choices: list[int] | None = None) -> None:
        """Abort these requests of a client; with choices, only choices[i] of numbers[i]. Ignore unknown ones."""

    def finish_client(self, client: int) -> None:
        """End all requests of a client that is gone, without reporting anything."""

    def hold_client(self, client: int, now_ns: int = 0) -> None:
        """Make all requests of a client that does not read wait, and free their rows and blocks."""

    def release_client(self, client: int, serial: int, now_ns: int = 0) -> int:
        """End a client's hold; return the number of its requests, which get the serials `serial`, `serial` + 1, ..."""

    def set_weight(self, client: int, weight: float) -> None:
        """Set the client's share relative to others of weight 1. A scheduler without shares ignores it."""

    def live_requests(self) -> list[Request]:
        """Return all requests that run or wait."""

    def get_request_counts(self) -> tuple[int, int]:
        """Return the numbers of requests (running, waiting)."""

    # --- a step ---

    def schedule(self, now_ns: int) -> SchedulerOutput:
        """Return the next plan, empty if nothing can run.

        It may be called again before the last plan's result is known; see ARCHITECTURE.md, Depth.
        """

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[ClientOutput]:
        """Take the result of the oldest plan that is not yet updated; return the messages for the clients."""

    def update_draft_token_ids(self, rows: Rows, tenancies: Ints, counts: AnyInts, token_ids: TokenIds) -> None:
        """Take counts[i] guessed next tokens of rows[i], row after row. Ignore rows that have another tenancy now."""

    def take_outputs(self) -> list[ClientOutput]:
        """Return the messages that do not depend on a step's result: refusals and aborts."""

    # --- state ---

    @property
    def has_work(self) -> bool:
        """Return whether a step can change anything. If not, only a message or a deadline can change that."""

    @property
    def has_unfinished_requests(self) -> bool:
        """Return whether any request runs or waits."""

    @property
    def has_finished_requests(self) -> bool:
        """Return whether requests have left their rows since the last plan, which the executor does not know yet."""

    def make_stats(self) -> Statistics:
        """Return counters since the start, and gauges. call and engine_ns are 0."""

    def check_integrity(self) -> None:
        """Check the invariants between two steps. Errors: AssertionError with the numbers."""

    # --- control ---

    def pause(self, mode: PauseMode) -> None:
        """Stop requests from starting (NEW) or from running at all (ALL). Aborts and deadlines still end requests."""

    def resume(self) -> None:
        """End any pause."""

    def reset_prefix_cache(self) -> None:
        """Forget the content of all blocks. Running requests keep theirs, but no other request finds them."""

    def lose_executor(self) -> None:
        """Make all requests wait, because the executor was lost with rows, blocks and copies. Plan nothing."""

    def restore_executor(self) -> None:
        """Plan again: the executor is back, and has no requests."""

    def use_weights(self, mark: WeightsMark) -> None:
        """Make all requests start again with other weights: what was computed with the earlier ones is forgotten."""

    def sleep(self, level: int) -> None:
        """Make all requests wait until wake_up(): the executor frees its memory."""

    def wake_up(self) -> str:
        """Run requests again, and return ""; or return why that is not possible."""

    def shutdown(self) -> None:
        """Release what the scheduler holds beyond memory. Called once, after the last step."""


#: Creates a scheduler. epoch: the number of this engine among those that its owner has started. Errors: ConfigError for
#: an option that the scheduler does not support.
CreateScheduler: TypeAlias = Callable[[ResolvedConfig, ModelInfo, int], SchedulerInterface]
