"""OracleExecutor: it yields the tokens that a capture has of each request, whatever the schedule."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TypeAlias

import msgspec
import numpy as np

from core.batch.table import BatchTable
from core.execution.executor import ModelInfo, StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.fake import FakeExecutor
from ipc.arrays import Floats, Int32s, Rows
from ipc.config import EngineConfig

#: (client, request number, choice)
ChoiceKey = tuple[int, int, int]


#: Candidates of beam searches by beam_key(): ids and log probabilities.
Candidates: TypeAlias = Mapping[bytes, tuple[Int32s, Floats]]
_DIGEST_BYTES = 16


def beam_key(client: int, number: int, token_ids: Int32s) -> bytes:
    """Return what stands for the tokens of a beam of a request, its prompt included."""
    named = client.to_bytes(8, "little", signed=True) + number.to_bytes(8, "little")
    return blake2b(named + token_ids.astype("<i4", copy=False).tobytes(), digest_size=_DIGEST_BYTES).digest()


class OracleExecutor(FakeExecutor):
    """An executor without a model for another schedule of recorded requests.

    tokens: output token ids of each choice, from its first. At numerics level L2 these are the tokens under any
    schedule, and candidates are what beams with the same tokens had. A choice that gets further than recorded, because
    it was aborted then, gets tokens that end nothing; they are counted in num_made_up. table: the scheduler's, set once
    the engine is made.
    """

    table: BatchTable

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        tokens: Mapping[ChoiceKey, Sequence[int]],
        candidates: Candidates | None = None,
    ) -> None:
        super().__init__(
            msgspec.structs.replace(config, enable_lora=False, lora_modules={})
        )  # no token depends on them
        self._recorded_candidates = candidates or {}
        self.info = info
        self.num_made_up = 0
        self._recorded = tokens
        self._of_row: dict[int, Sequence[int]] = {}
        self._filler: dict[int, int] = {}

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step with the recorded tokens of its rows."""
        table = self.table
        for new in plan.added:
            key = (int(table.client[new.row]), int(table.number[new.row]), new.choice)
            self._of_row[new.row] = self._recorded.get(key, ())
            ends = {*self.info.eos_token_ids, *(new.params.stop_token_ids or ())}
            self._filler[new.row] = next(token for token in range(len(ends) + 1) if token not in ends)
        return super().execute(plan)

    def _adapt(self, plan: SchedulerOutput) -> None:
        """Do nothing: the recorded tokens are those that adapters have given."""

    def _candidates_of(self, row: int) -> tuple[Int32s, Floats] | None:
        """Return the recorded candidates of a beam with these tokens; a beam that was not there gets made-up ones."""
        known = self._table.tokens.read(row, 0, int(self._table.num_tokens[row]))
        key = beam_key(int(self.table.client[row]), int(self.table.number[row]), known)
        if key in self._recorded_candidates:
            return self._recorded_candidates[key]
        self.num_made_up += 1
        return super()._candidates_of(row)

    def _sample(self, rows: Rows) -> Int32s:
        positions = self._table.num_tokens[rows] - self._table.num_prompt_tokens[rows]
        sampled = np.empty(len(rows), np.int32)
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            recorded = self._of_row[row]
            if position < len(recorded):
                sampled[index] = recorded[position]
            else:
                sampled[index] = self._filler[row]
                self.num_made_up += 1
        return sampled
