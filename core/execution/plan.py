"""The plan of a step and its result: all that passes between the scheduler and an executor.

A plan is immutable, self-contained and encodable: an executor learns of rows, tokens and blocks only from plans, so
that it may live in another process and run behind the scheduler by several steps.
"""

from typing import Any

import msgspec
import numpy as np

from ipc.arrays import NO_INT32S, Bools, Floats, Int32s
from ipc.sampling_params import SamplingParams

#: In ModelRunnerOutput.token_ids: the row's known tokens are not all computed yet, so nothing was sampled.
NO_TOKEN = -1
#: In ModelRunnerOutput.token_ids: the row fails, and its request alone with it: its logits were not finite, or what
#: ModelRunnerOutput.failures says. An executor that runs behind the scheduler still counts a token for the row: the
#: next plan may cover it already.
FAILED_TOKEN = -2


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that begins (or begins again after preemption) in this step, and all the executor must know of it."""

    row: int
    token_ids: Int32s  # prompt, then output so far
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache
    block_ids: Int32s  # enough for num_computed_tokens and this step's tokens
    params: SamplingParams
    seed: int  # uint64
    choice: int = 0  # of its request: choices with one seed draw other numbers

    @property
    def wants_prompt_logprobs(self) -> bool:
        """A request with output tokens has reported those of its prompt before."""
        return self.params.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step's plan. The executor applies removed, added and new blocks, then copies blocks out of the cache to the
    host and from the host back into it, in that order, then runs the batch."""

    step: int
    removed_rows: Int32s  # rows whose request finished, was aborted or preempted; may be added again in this plan
    added: list[NewRow]
    block_rows: Int32s  # [n] rows already known that get one more block each entry, in table order
    block_ids: Int32s  # [n]
    rows: Int32s  # [R] the batch, in scheduling order
    num_scheduled_tokens: Int32s  # [R] > 0
    swapped_out_blocks: Int32s = NO_INT32S  # [n] of the cache, copied to
    swapped_out_slots: Int32s = NO_INT32S  # [n] blocks of the host pool
    swapped_in_slots: Int32s = NO_INT32S  # [m] of the host pool, copied to
    swapped_in_blocks: Int32s = NO_INT32S  # [m] blocks of the cache

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole batch computes in this step."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def is_empty(self) -> bool:
        """Nothing to run; there may still be rows to remove."""
        return len(self.rows) == 0


class LogprobColumns(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at L positions of some rows, ascending in each row; see ipc.messages.Logprobs."""

    rows: Int32s  # [L] index in the plan's rows
    positions: Int32s  # [L] index in the row's tokens, the prompt's first
    counts: Int32s  # [L]
    ranks: Int32s  # [L]
    token_ids: Int32s  # [sum(counts)]
    values: Floats  # [sum(counts)]

    def where(self, keep: Bools) -> "LogprobColumns":
        """Those in the mask keep [L]."""
        entries = keep.repeat(self.counts)
        columns = (self.rows[keep], self.positions[keep], self.counts[keep], self.ranks[keep])
        return LogprobColumns(*columns, self.token_ids[entries], self.values[entries])


def concat_logprobs(parts: list[LogprobColumns]) -> LogprobColumns | None:
    """One after the other; None for none."""
    if not parts:
        return None
    names = LogprobColumns.__struct_fields__
    return LogprobColumns(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step yields, aligned with the plan's R rows.

    A row may yield several tokens (`counts`). All are known tokens of the row from then on; those whose K and V the
    step did not compute are computed by the next steps, as the tokens of a prompt are. An executor that yields several
    must know them when it begins the row's next step, which may be planned already (Pipeline, depth 2): a row of
    whose known tokens that step leaves some uncomputed yields none in it.
    """

    step: int
    token_ids: Int32s  # [R] the row's next token, NO_TOKEN or FAILED_TOKEN; with counts [sum(counts)], row after row
    logprobs: LogprobColumns | None = None
    counts: Int32s | None = None  # [R] tokens of each row; 0 = NO_TOKEN, FAILED_TOKEN stands alone. None: one each
    failures: list[tuple[int, str]] = []  # (index in the plan's rows, text) of FAILED_TOKENs with a text of their own


def _encode_array(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return value.astype("<i4", copy=False).tobytes()
    raise TypeError(f"a plan holds int32 columns, not {type(value).__name__}")


def encode_plan(plan: SchedulerOutput) -> bytes:
    """Return the plan as msgpack; equal plans give equal bytes."""
    return msgspec.msgpack.encode(plan, enc_hook=_encode_array)
