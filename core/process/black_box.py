"""BlackBox: the engine's side of its black box (ipc/black_box.py): each step is noted before it runs.

It watches the engine's pipeline (core/execution/pipeline.py), so neither the step nor an executor knows of it. A
request's digest is made when its row is added; a steady step copies three columns and sets some numbers.
"""

import mmap
import os
import time
from typing import Any

from core.execution.executor import WARM_UP_TOKENS
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.scheduling.scheduler import Scheduler
from ipc.black_box import (
    BEGUN,
    BEGUN_AT,
    DIGEST_BYTES,
    HEADER,
    NUM_SIZES,
    PROCESS,
    TURNED,
    TURNED_AT,
    Page,
    Reading,
    request_digest,
    size_of,
)

_WINDOW = 500  # steps of one size, after which the slowest of the window before is forgotten


class BlackBox:
    """The writer of one page.

    fd: the memory file's, -1 = nobody reads it. num_rows: the engine's max_num_seqs. warm_up_ns: how long
    Executor.warm_up() took, by which the first step is expected; 0 = unknown.
    """

    def __init__(self, fd: int, num_rows: int, epoch: int, warm_up_ns: int = 0) -> None:
        page = Page(mmap.mmap(fd, size_of(num_rows)), num_rows)
        self._memory: Any = page.memory  # takes columns, which their type does not say
        self._slowest_ns = page.slowest_ns
        _, ends, rows, counts, self._digests = page.offsets
        self._slots = [(rows + 4 * n * num_rows, counts + 4 * n * num_rows, ends + 8 * n * num_rows) for n in (0, 1)]
        self._ends_bytes = 8 * num_rows
        self._began = [(0, 0), (0, 0)]  # (time, size class) of the last two steps
        self._warm_up_ns = warm_up_ns
        self._slowest: list[int] = page.slowest_ns[0].tolist()  # of the engines before this one, too
        self._slowest_before: list[int] = page.slowest_ns[1].tolist()
        self._expected = [self._slowest_of(kind) for kind in range(NUM_SIZES)]
        self._num_of_size = [0] * NUM_SIZES
        self._num_begun = self._num_ended = self._num_ended_at_turn = self._num_turns = 0
        self._sizes = (0, 0)  # requests and tokens of the last step
        self._scheduler: Scheduler | None = None
        self._num_scheduled = 0  # tokens, up to the last step
        HEADER.pack_into(self._memory, 0, *(0,) * len(Reading._fields))
        TURNED.pack_into(self._memory, TURNED_AT, 0, 0, time.monotonic_ns(), 0)
        PROCESS.pack_into(self._memory, 0, epoch + 1, os.getpid())

    def watch(self, scheduler: Scheduler) -> None:
        """Set the scheduler whose steps these are. Called once, before the first of them."""
        self._scheduler = scheduler
        self._num_scheduled = scheduler.stats.num_scheduled_tokens

    def begin(self, plan: SchedulerOutput) -> None:
        """Note a step that begins."""
        scheduler, memory, step, size = self._scheduler, self._memory, self._num_begun + 1, len(plan.rows)
        assert scheduler is not None, "begin() before watch()"
        if plan.added or plan.added_pooling:
            self._note_added(plan)
        rows, counts, ends = self._slots[step % 2]
        memory[rows : rows + 4 * size] = plan.rows
        memory[ends : ends + self._ends_bytes] = scheduler.table.num_computed_tokens
        num_scheduled = scheduler.stats.num_scheduled_tokens  # a sum of the plan's column would cost 2 us
        num_tokens, self._num_scheduled = num_scheduled - self._num_scheduled, num_scheduled
        if num_tokens != size:  # else it is one of each row
            memory[counts : counts + 4 * size] = plan.num_scheduled_tokens
        kind = min(num_tokens.bit_length(), NUM_SIZES) - 1
        begun_ns, before = time.monotonic_ns(), self._sizes
        self._num_begun, self._sizes, self._began[step % 2] = step, (size, num_tokens), (begun_ns, kind)
        BEGUN.pack_into(memory, BEGUN_AT, step, begun_ns, self._expected[kind], size, num_tokens, *before)

    def end(self, output: ModelRunnerOutput) -> None:
        """Note that the oldest step has ended. The page says so from the end of the loop's turn on."""
        self._num_ended += 1

    def turn(self, num_waiting: int) -> None:
        """Note that a turn of the engine's loop ends, and how many requests wait."""
        now_ns, step = time.monotonic_ns(), self._num_ended
        self._num_turns += 1
        TURNED.pack_into(self._memory, TURNED_AT, step, self._num_turns, now_ns, num_waiting)
        if step == self._num_ended_at_turn:
            return
        self._num_ended_at_turn = step
        began_ns, kind = self._began[step % 2]
        self._num_of_size[kind] += 1
        if now_ns - began_ns > self._slowest[kind] or self._num_of_size[kind] == _WINDOW:
            self._note_slowest(kind, now_ns - began_ns)

    def _note_added(self, plan: SchedulerOutput) -> None:
        for new in plan.starts:
            prompt = new.token_ids[: new.num_prompt_tokens].astype("<i4", copy=False).tobytes()
            at = self._digests + DIGEST_BYTES * new.row
            self._memory[at : at + DIGEST_BYTES] = request_digest(prompt, new.params)

    def _note_slowest(self, kind: int, took_ns: int) -> None:
        """Note the slowest step of a size, or that a window of steps is over."""
        self._slowest[kind] = max(self._slowest[kind], took_ns)
        if self._num_of_size[kind] == _WINDOW:
            self._slowest_before[kind], self._slowest[kind], self._num_of_size[kind] = self._slowest[kind], 0, 0
        self._slowest_ns[:, kind] = self._slowest[kind], self._slowest_before[kind]
        for larger in range(kind, NUM_SIZES):
            self._expected[larger] = self._slowest_of(larger)

    def _slowest_of(self, kind: int) -> int:
        """Return the slowest recent step of a size, ns; of a size that never ran, what the next smaller one suggests.

        Before any has run: what the warm-up suggests. 0 = nothing is known.
        """
        for smaller in range(kind, -1, -1):
            slowest = max(self._slowest[smaller], self._slowest_before[smaller])
            if slowest:
                return slowest << (kind - smaller)
        return self._warm_up_ns << max(0, kind + 1 - WARM_UP_TOKENS.bit_length())
