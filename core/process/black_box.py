"""BlackBox: the engine's side of its black box (ipc/records/black_box.py). Each step is recorded before it runs.

It watches the engine's pipeline (core/execution/pipeline.py), so neither the step nor an executor is involved. A
request's digest is computed when its row is added. A steady step (the same rows as in the previous step, and one token
of each in both) stores no column, because each row just has one token more: it compares the rows and sets some numbers.
"""

import mmap
import os
import time
from typing import Any

from core.execution.executor import WARM_UP_TOKENS
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.features.image_waits import NO_WAITS, ImageWaits
from core.scheduling.interface import SchedulerInterface
from core.scheduling.stats import SchedulerStats
from ipc.records.black_box import (
    BEGUN,
    BEGUN_AT,
    DIGEST_BYTES,
    HEADER,
    NUM_SIZES,
    PROCESS,
    TURNED,
    TURNED_AT,
    Page,
    request_digest,
    rows_of,
    size_of,
)

#: The places of the page's parts.
_BEGUN, _TURNED = slice(BEGUN_AT, BEGUN_AT + BEGUN.size), slice(TURNED_AT, TURNED_AT + TURNED.size)
_WINDOW = 500  # steps of one size after which the slowest of the previous window is forgotten


class _Size:
    """Durations of steps of one size, in ns."""

    __slots__ = ("expected", "num_steps", "slowest", "slowest_before")

    def __init__(self, slowest: int, slowest_before: int) -> None:
        self.slowest, self.slowest_before = slowest, slowest_before  # in this window of steps, and in the previous one
        self.expected = self.num_steps = 0


class BlackBox:
    """The writer of one page.

    fd: the memory file's; -1 = it is not read. A file with too few rows, or of a size that no page has, created by an
    owner of another version, is not used either. num_rows: the engine's max_num_seqs. warm_up_ns: how long
    Executor.warm_up() took, used to predict the first step; 0 = unknown. waits: how long the images of a step may take.
    may_wait: any step may have images, because the scheduler does not plan them.
    """

    def __init__(
        self,
        fd: int,
        num_rows: int,
        epoch: int,
        warm_up_ns: int = 0,
        *,
        waits: ImageWaits = NO_WAITS,
        may_wait: bool = False,
    ) -> None:
        self._ends_bytes = 8 * num_rows
        if fd >= 0 and rows_of(fd) >= num_rows:
            num_rows = rows_of(fd)
        else:
            fd = -1
        page = Page(mmap.mmap(fd, size_of(num_rows)), num_rows)
        self._memory: Any = page.memory  # accepts columns, which their type does not express
        self._slowest_ns = page.slowest_ns
        _, ends, rows, counts, self._digests = page.offsets
        self._slots = [(rows + 4 * n * num_rows, counts + 4 * n * num_rows, ends + 8 * n * num_rows) for n in (0, 1)]
        self._warm_up_ns, self._waits, self._may_wait = warm_up_ns, waits, may_wait
        self._kinds = [_Size(*of_kind) for of_kind in page.slowest_ns.T.tolist()]  # including those of previous engines
        self._expect()
        self._began = [(0, self._kinds[0]), (0, self._kinds[0])]  # of the last two steps
        self._num_begun = self._num_ended = self._num_ended_at_turn = self._num_turns = 0
        self._sizes = (0, 0)  # requests and tokens of the last step
        self._rows = b""  # of the last step
        self._stored = 0  # see Reading
        self._scheduler: SchedulerInterface | None = None
        self._stats: SchedulerStats | None = None  # the scheduler's
        self._kind = self._kinds[0]  # of the last step
        self._num_scheduled = 0  # tokens, up to the last step
        # Never pack_into(), which writes zeros first and then byte after byte: a reader would see them.
        self._memory[: HEADER.size] = bytes(HEADER.size)
        self._memory[_TURNED] = TURNED.pack(0, 0, time.monotonic_ns(), 0)
        self._memory[: PROCESS.size] = PROCESS.pack(epoch + 1, os.getpid())

    def watch(self, scheduler: SchedulerInterface) -> None:
        """Set the scheduler whose steps are recorded. Called once, before the first of them."""
        self._scheduler, self._stats = scheduler, scheduler.stats
        self._num_scheduled = scheduler.stats.num_scheduled_tokens

    def begin(self, plan: SchedulerOutput) -> None:
        """Record a step that starts."""
        stats, step, stored_before = self._stats, self._num_begun + 1, self._stored
        assert stats is not None, "begin() before watch()"
        num_scheduled, rows = stats.num_scheduled_tokens, plan.rows.tobytes()
        num_tokens = num_scheduled - self._num_scheduled  # summing the plan's column would cost 2 us
        self._num_scheduled, (rows_before, tokens_before), kind = num_scheduled, self._sizes, self._kind
        if num_tokens == tokens_before == rows_before and rows == self._rows and not (plan.added or plan.added_pooling):
            self._stored += 2
        else:
            self._store(plan, rows, num_tokens)
            self._sizes = len(plan.rows), num_tokens
            kind = self._kind = self._kinds[max(1, min(num_tokens.bit_length(), NUM_SIZES)) - 1]
        num_rows, num_tokens = self._sizes
        expected = kind.expected
        if expected and self._waits is not NO_WAITS:
            if plan.scheduled_encoder_inputs or self._may_wait:
                expected += self._waits.whole_ns
            if plan.image_parts:
                expected += self._waits.part_ns
        begun_ns = time.monotonic_ns()
        self._num_begun, self._began[step % 2] = step, (begun_ns, kind)
        self._memory[_BEGUN] = BEGUN.pack(
            step,
            begun_ns,
            expected,
            num_rows,
            num_tokens,
            rows_before,
            tokens_before,
            self._stored,
            stored_before,
        )

    def _store(self, plan: SchedulerOutput, rows: bytes, num_tokens: int) -> None:
        """Store a plan's columns in the slot that the previous plan did not use."""
        assert self._scheduler is not None, "begin() before watch()"
        self._rows, self._stored = rows, 1 - self._stored % 2
        memory, (rows_at, counts_at, ends_at) = self._memory, self._slots[self._stored]
        memory[rows_at : rows_at + len(rows)] = rows
        memory[ends_at : ends_at + self._ends_bytes] = self._scheduler.table.num_computed_tokens
        if num_tokens != len(plan.rows):  # otherwise it is one for each row
            memory[counts_at : counts_at + len(rows)] = plan.num_scheduled_tokens
        if plan.starts:
            self._note_added(plan)

    def end(self, output: ModelRunnerOutput) -> None:
        """Record that the oldest step has ended. The page shows it from the end of the loop's turn on."""
        self._num_ended += 1

    def turn(self, num_waiting: int) -> None:
        """Record that a turn of the engine's loop has ended, and how many requests wait."""
        now_ns, step = time.monotonic_ns(), self._num_ended
        self._num_turns += 1
        self._memory[_TURNED] = TURNED.pack(step, self._num_turns, now_ns, num_waiting)
        if step == self._num_ended_at_turn:
            return
        self._num_ended_at_turn = step
        began_ns, kind = self._began[step % 2]
        kind.num_steps += 1
        if now_ns - began_ns > kind.slowest or kind.num_steps == _WINDOW:
            self._note_slowest(kind, now_ns - began_ns)

    def _note_added(self, plan: SchedulerOutput) -> None:
        features = dict(plan.features)
        for new in plan.starts:
            prompt = new.token_ids[: new.num_prompt_tokens].astype("<i4", copy=False).tobytes()
            at = self._digests + DIGEST_BYTES * new.row
            self._memory[at : at + DIGEST_BYTES] = request_digest(prompt, new.params, features.get(new.row, ()))

    def _note_slowest(self, kind: _Size, took_ns: int) -> None:
        """Record the slowest step of a size, or that a window of steps is over."""
        kind.slowest = max(kind.slowest, took_ns)
        if kind.num_steps == _WINDOW:
            kind.slowest_before, kind.slowest, kind.num_steps = kind.slowest, 0, 0
        index = self._kinds.index(kind)
        self._slowest_ns[:, index] = kind.slowest, kind.slowest_before
        self._expect()

    def _expect(self) -> None:
        """Set the expected duration of steps of each size, in ns: the slowest recent one.

        For a size that never ran, it is derived from the next smaller one; before any has run, from the warm-up. 0 =
        unknown.
        """
        known = 0
        for index, kind in enumerate(self._kinds):
            known = max(kind.slowest, kind.slowest_before) or 2 * known
            expected = known or self._warm_up_ns << max(0, index + 1 - WARM_UP_TOKENS.bit_length())
            kind.expected = expected
