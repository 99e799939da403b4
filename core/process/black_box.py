"""BlackBox: the engine's side of its black box (ipc/black_box.py): each step is noted before it runs.

WatchedExecutor wraps an executor, so the step does not know of it. A request's digest is made when its row is added; a
steady step copies three columns.
"""

import mmap
import os
import time

import numpy as np

from core.execution.executor import Executor, StepHandle
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from ipc.arrays import Ints
from ipc.black_box import HEADER, NUM_SIZES, Page, request_digest, size_of

_WINDOW = 500  # steps of one size, after which the slowest of the window before is forgotten


class BlackBox:
    """The writer of one page.

    fd: the memory file's, -1 = nobody reads it. num_rows: the engine's max_num_seqs.
    """

    def __init__(self, fd: int, num_rows: int, epoch: int) -> None:
        self._page = Page(mmap.mmap(fd, size_of(num_rows)), num_rows)
        self._head = (epoch, os.getpid())
        self._num_writes = HEADER.unpack_from(self._page.memory)[0]
        self._num_begun = self._num_ended = 0
        self._begun_ns = self._ended_ns = self._num_tokens = self._expected_ns = 0
        self._num_turns = self._turned_ns = 0
        self._began = [(0, 0), (0, 0)]  # (time, size class) of the last two steps
        self._slowest: list[int] = self._page.slowest_ns[0].tolist()  # of the engines before this one, too
        self._slowest_before: list[int] = self._page.slowest_ns[1].tolist()
        self._num_of_size = [0] * NUM_SIZES
        self._computed: Ints | None = None
        self._num_running = self._num_waiting = 0
        self._write()

    def watch(self, num_computed_tokens: Ints) -> None:
        """Set the batch table's column that says where each row is when the planned step has run."""
        self._computed = num_computed_tokens

    def begin(self, plan: SchedulerOutput) -> None:
        """Note a step that begins."""
        page, slot, size = self._page, (self._num_begun + 1) % 2, len(plan.rows)
        for new in plan.added:
            prompt = new.token_ids[: new.num_prompt_tokens].astype("<i4", copy=False).tobytes()
            page.digests[new.row] = np.frombuffer(request_digest(prompt, new.params), np.uint8)
        page.rows[slot, :size] = plan.rows
        page.counts[slot, :size] = plan.num_scheduled_tokens
        if self._computed is not None:
            page.ends[slot] = self._computed
        page.plan_sizes[slot] = self._num_running = size
        self._num_tokens = plan.num_tokens
        kind = min(self._num_tokens.bit_length(), NUM_SIZES) - 1
        self._expected_ns = self._slowest_of(kind)
        self._num_begun += 1
        self._begun_ns = time.monotonic_ns()
        self._began[slot] = (self._begun_ns, kind)
        self._write()

    def end(self) -> None:
        """Note that the oldest step has ended."""
        self._num_ended += 1
        began_ns, kind = self._began[self._num_ended % 2]
        self._ended_ns = time.monotonic_ns()
        took_ns = self._ended_ns - began_ns
        if took_ns > self._slowest[kind]:
            self._slowest[kind] = took_ns
            self._page.slowest_ns[0, kind] = took_ns
        self._num_of_size[kind] += 1
        if self._num_of_size[kind] % _WINDOW == 0:
            self._slowest_before[kind], self._slowest[kind] = self._slowest[kind], 0
            self._page.slowest_ns[:, kind] = 0, self._slowest_before[kind]
        self._write()

    def turn(self, num_waiting: int) -> None:
        """Note that the engine's loop has turned, and how many requests wait."""
        self._num_waiting = num_waiting
        self._num_turns += 1
        self._turned_ns = time.monotonic_ns()
        self._write()

    def _slowest_of(self, kind: int) -> int:
        """Return the slowest recent step of a size, ns; of a size that never ran, what the next smaller one suggests.

        0 = no step has run.
        """
        for smaller in range(kind, -1, -1):
            slowest = max(self._slowest[smaller], self._slowest_before[smaller])
            if slowest:
                return slowest << (kind - smaller)
        return 0

    def _write(self) -> None:
        self._num_writes += 1
        HEADER.pack_into(
            self._page.memory,
            0,
            self._num_writes,
            *self._head,
            self._num_begun,
            self._num_ended,
            self._begun_ns,
            self._ended_ns,
            self._num_tokens,
            self._expected_ns,
            self._num_turns,
            self._turned_ns,
            self._num_running,
            self._num_waiting,
            self._num_writes,
        )


class WatchedExecutor:
    """An Executor whose steps are noted in a black box."""

    def __init__(self, executor: Executor, box: BlackBox) -> None:
        self._executor = executor
        self._box = box
        self.info = executor.info
        self.grammars = executor.grammars
        self.determine_num_available_blocks = executor.determine_num_available_blocks
        self.cache_memory_bytes = executor.cache_memory_bytes
        self.initialize_cache = executor.initialize_cache
        self.measure_costs = executor.measure_costs
        self.measure_steps = executor.measure_steps
        self.prepare_ahead = executor.prepare_ahead
        self.close = executor.close

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Note the step, and begin it."""
        self._box.begin(plan)
        return _WatchedStep(self._executor.execute(plan), self._box)


class _WatchedStep:
    def __init__(self, handle: StepHandle, box: BlackBox) -> None:
        self._handle = handle
        self._box = box

    def result(self) -> ModelRunnerOutput:
        output = self._handle.result()
        self._box.end()
        return output
