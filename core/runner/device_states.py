"""DeviceRowStates: where a device's kernels find the recurrent states of rows, and put those before drafts."""

from typing import NamedTuple

import numpy as np
import torch

from core.execution.plan import SchedulerOutput
from core.runner.device_columns import StepColumns, first_tokens
from core.runner.device_tables import DeviceTables
from core.runner.host_rows import HostRows
from core.runner.state_rows import DraftStates, RowStates
from ipc.tables.arrays import Int32s, Ints
from kernels.triton.recurrence import DeviceStates, decoding_states


class PendingStates(NamedTuple):
    """The states before the drafts of a step whose tokens are not known yet."""

    drafted: DraftStates
    rows: Ints  # [R] the plan's
    tenancies: Ints  # [R] theirs when the step was launched


class DeviceRowStates:
    """The states of a device runner's rows.

    The host knows in which slot the state of a row is. The device has a copy of that column, because a CUDA graph of a
    decode step reads it. A row with drafts in flight has no other step in flight, so its slot changes between its
    steps.
    """

    def __init__(self, states: RowStates, tables: DeviceTables, host: HostRows) -> None:
        """tables, host: the runner's."""
        self._states, self._tables, self._host = states, tables, host
        self._num_rows = len(tables.tokens)
        self._slots = torch.arange(self._num_rows, dtype=torch.int32, device=tables.device)

    def begin(self, plan: SchedulerOutput, columns: StepColumns) -> tuple[Ints | None, PendingStates | None]:
        """Return where the step stores the state after each token [T], -1 = nowhere, None = none; and those in flight.

        The plan has been applied to the table.
        """
        if (offsets := columns.offsets) is None:
            return self._states.with_planned(None, first_tokens(columns)), None
        rows = plan.rows.astype(np.int64)
        before = self._states.before_drafts(
            rows, columns.in_plan, offsets, columns.logits_tokens, num_tokens=len(columns.rows)
        )
        saves = self._states.with_planned(before, first_tokens(columns))
        assert self._states.drafted is not None
        return saves, PendingStates(self._states.drafted, rows, self._host.tenancies[rows])

    def accept(self, pending: PendingStates, counts: Int32s) -> None:
        """Give each row the state after its last accepted draft. counts [R]: how many tokens each row yields."""
        self._states.accept(pending.drafted, counts, self._host.tenancies[pending.rows] == pending.tenancies)
        self._slots.copy_(self._tables.send(self._states.places[: self._num_rows].astype(np.int32)), non_blocking=True)

    def of_step(self, columns: StepColumns, saves: torch.Tensor | None) -> DeviceStates:
        """Return where the states of a step's requests are. saves: see DeviceStates."""
        firsts = first_tokens(columns)
        slots = self._states.places[columns.rows[firsts[:-1]]]
        owners = np.arange(len(firsts) - 1).repeat(np.diff(firsts))
        sent = self._tables.send_columns((slots, firsts, owners))
        return DeviceStates(self._states.states, sent[0], sent[1], sent[2], saves)

    def of_decode(self, rows: torch.Tensor, saves: torch.Tensor | None) -> DeviceStates:
        """Return where the states of rows [T] are that decode a token each, or several with `saves`; -1 = padding.

        Everything is read on the device, so that a CUDA graph can capture it.
        """
        slots = torch.where(rows < 0, rows, self._slots[rows.clamp_min(0).long()])
        return decoding_states(self._states.states, slots, saves)
