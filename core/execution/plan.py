"""The plan of a step and its result: everything that passes between the scheduler and an executor.

A plan is immutable, self-contained and encodable. An executor learns of rows, tokens and blocks only from plans, so it
may run in another process, and several steps behind the scheduler.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import NO_INT32S, Bools, Floats, Int32s
from ipc.wire.feature_messages import FeatureUse

#: In ModelRunnerOutput.token_ids: nothing was sampled, because some known tokens of the row are not computed yet.
NO_TOKEN = -1
#: In ModelRunnerOutput.token_ids: only this row's request fails. Its logits were not finite, or
#: ModelRunnerOutput.failures has the reason. An executor that runs behind the scheduler still counts a token for the
#: row, because the next plan may already include it.
FAILED_TOKEN = -2


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that starts or resumes in this step, with everything that the executor needs to know about it."""

    row: int
    token_ids: Int32s  # prompt, then output so far
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache
    block_ids: Int32s  # enough for num_computed_tokens and this step's tokens
    params: SamplingParams
    seed: int  # uint64
    choice: int = 0  # index in its request; choices with the same seed draw different numbers

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether to report the prompt's logprobs. A request with output tokens has already reported them."""
        return self.params.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens


class NewPooling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A pooling request that starts or resumes in this step. Its fields mean the same as those of NewRow."""

    row: int
    token_ids: Int32s
    num_computed_tokens: int
    block_ids: Int32s
    params: PoolingParams

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens: the request has only prompt tokens."""
        return len(self.token_ids)


class RowBlocks(msgspec.Struct, frozen=True, array_like=True):
    """New blocks of rows.

    Each entry appends one block to a row's table, in table order. Entries of a row are adjacent.
    """

    rows: Int32s  # [n]
    ids: Int32s  # [n]


class SavedStates(NamedTuple):
    """Recurrent states that a step stores while it computes prompts, for later requests."""

    rows: Int32s  # [v] index in the plan's rows
    after: Int32s  # [v] number of the row's tokens of the step that are in the state, > 0
    slots: Int32s  # [v] where it is stored; slots are numbered after the rows, and none is there twice


#: Of a step that stores no states.
NONE_SAVED = SavedStates(NO_INT32S, NO_INT32S, NO_INT32S)


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step's plan.

    The executor applies removed rows, added rows and new blocks. Then it copies blocks: from the cache to the host,
    within the cache, from the host into the cache. Then it copies recurrent states. Then it runs the batch.
    """

    step: int
    removed_rows: Int32s  # rows whose request has finished, was aborted or preempted; may be added again in this plan
    added: list[NewRow]
    block_rows: Int32s  # [n] rows that exist already; each entry appends one block, in table order
    block_ids: Int32s  # [n]
    rows: Int32s  # [R] the batch, in scheduling order
    num_scheduled_tokens: Int32s  # [R] > 0, including drafts
    swapped_out_blocks: Int32s = NO_INT32S  # [n] blocks of the cache, copied to
    swapped_out_slots: Int32s = NO_INT32S  # [n] blocks of the host pool
    swapped_in_slots: Int32s = NO_INT32S  # [m] blocks of the host pool, copied to
    swapped_in_blocks: Int32s = NO_INT32S  # [m] blocks of the cache
    num_draft_tokens: Int32s = NO_INT32S  # [R] drafts, which come after the row's known tokens; empty: no row has any
    draft_token_ids: Int32s = NO_INT32S  # [sum(num_draft_tokens)] row after row
    copied_blocks: Int32s = NO_INT32S  # [k] blocks of the cache, all read before any is written, copied to
    copied_to: Int32s = NO_INT32S  # [k] other blocks of the cache
    added_pooling: list[NewPooling] = []  # in addition to `added`
    # (row, digest of its adapter) of rows in `added` and `added_pooling` that have one
    adapters: list[tuple[int, str]] = []
    #: (row, features that replace tokens of its prompt) of rows in `added` with any. These tokens have ids below 0.
    features: list[tuple[int, list[FeatureUse]]] = []
    #: [s] recurrent states: of rows, or of slots, numbered after the rows; copied one after the other
    copied_states: Int32s = NO_INT32S
    copied_states_to: Int32s = NO_INT32S  # [s]
    #: New blocks of each further kind of layer (core/models/layers/cache_pages.py), of running and starting rows. 0
    #: stands for tokens that the kind's window has passed. Empty: no row gets any.
    others: list[RowBlocks] = []
    #: The fields of SavedStates. The states are those of this step, and no other row of the plan uses them.
    saved_rows: Int32s = NO_INT32S
    saved_after: Int32s = NO_INT32S
    saved_slots: Int32s = NO_INT32S
    #: How many leading blocks all running rows have in common, the same blocks in the same places. It follows from the
    #: blocks above. An executor may read these once for all rows. 0 for a model with a window in any layer.
    num_common_prefix_blocks: int = 0
    #: (row, places among its features) of the images whose embeddings this step needs and the executor does not have.
    #: It encodes them before the batch runs, and keeps them until a plan frees them.
    scheduled_encoder_inputs: list[tuple[int, list[int]]] = []
    #: Digests of images whose embeddings, or what has been made of them in parts, are dropped, before others are
    #: encoded. A step may have nothing else.
    freed_encoder_inputs: list[bytes] = []
    #: (digest, part) of large images, which are encoded in parts (FeatureUse.num_parts): this step computes up to the
    #: end of this part, counted from 1. Embeddings are kept as those of scheduled_encoder_inputs. Nothing needs them
    #: before a later step, and a step may have no rows.
    image_parts: list[tuple[bytes, int]] = []

    @property
    def starts(self) -> Sequence[NewRow | NewPooling]:
        """Return all requests that start or resume."""
        return [*self.added, *self.added_pooling] if self.added_pooling else self.added

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the whole batch computes in this step."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to run. There may still be rows to remove."""
        return len(self.rows) == 0 and not self.image_parts and not self.freed_encoder_inputs


class LogprobColumns(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at L positions of some rows, ascending within each row; see ipc.wire.messages.Logprobs."""

    rows: Int32s  # [L] index in the plan's rows
    positions: Int32s  # [L] index in the row's tokens, counted from the start of the prompt
    counts: Int32s  # [L]
    ranks: Int32s  # [L]
    token_ids: Int32s  # [sum(counts)]
    values: Floats  # [sum(counts)]

    def where(self, keep: Bools) -> "LogprobColumns":
        """Return the positions in the mask keep [L]."""
        entries = keep.repeat(self.counts)
        return LogprobColumns(
            self.rows[keep],
            self.positions[keep],
            self.counts[keep],
            self.ranks[keep],
            self.token_ids[entries],
            self.values[entries],
        )


class PooledColumns(msgspec.Struct, frozen=True, array_like=True):
    """The vectors of P pooling rows whose last tokens were computed in this step; see ipc.wire.messages.Pooled."""

    rows: Int32s  # [P] index in the plan's rows, ascending
    counts: Int32s  # [P]; 0 = the request fails, because its vectors are not finite
    widths: Int32s  # [P]
    values: Floats  # [sum(counts * widths)]

    def where(self, keep: Bools) -> "PooledColumns":
        """Return the columns of the rows in the mask keep [P]."""
        if keep.all():
            return self
        sizes = self.counts.astype(np.int64) * self.widths
        return PooledColumns(self.rows[keep], self.counts[keep], self.widths[keep], self.values[keep.repeat(sizes)])


def concat_logprobs(parts: list[LogprobColumns]) -> LogprobColumns | None:
    """Concatenate the columns of all parts; None if there are none."""
    if not parts:
        return None
    names = LogprobColumns.__struct_fields__
    return LogprobColumns(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """The result of one step, aligned with the plan's R rows.

    A row may yield several tokens (`counts`). All of them are known tokens of the row from then on. The next steps
    compute K and V for those that this step did not compute, as for prompt tokens. An executor that yields several
    tokens must know them when it starts the row's next step, which may be planned already (Pipeline, depth 2). If that
    step leaves known tokens of the row uncomputed, the row yields none in it.

    A row with drafts yields the accepted ones and the token after them (core/runner/accepted.py). K and V of the
    accepted ones are computed.
    """

    step: int
    token_ids: Int32s  # [R] the row's next token, NO_TOKEN or FAILED_TOKEN; with counts: [sum(counts)], row after row
    logprobs: LogprobColumns | None = None
    # [R] number of tokens of each row; 0 = NO_TOKEN; FAILED_TOKEN is always alone. None: one each
    counts: Int32s | None = None
    failures: list[tuple[int, str]] = []  # (index in the plan's rows, text) of FAILED_TOKENs with their own text
    #: Drafts that the executor proposes for the rows' next steps: [R] counts, and [sum] tokens, row after row. None: no
    #: drafts.
    draft_counts: Int32s | None = None
    draft_token_ids: Int32s = NO_INT32S
    #: Vectors of pooling rows, which have NO_TOKEN in token_ids. Their requests end. None: there are none.
    pooled: PooledColumns | None = None
    #: The most likely next tokens, best first, of beam search rows that have all their tokens computed. Such a row
    #: yields no token. The next plan adds it again with the token that its search has chosen.
    candidates: LogprobColumns | None = None


def _encode_array(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return value.astype("<i4", copy=False).tobytes()
    raise TypeError(f"a plan holds int32 columns, not {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_INT32 = np.dtype("<i4")
_DRAFTS, _COPIES, _POOLING, _ADAPTERS, _FEATURES, _STATES, _OTHERS, _SAVED, _COMMON, _ENCODED, _FREED, _PARTS = map(
    SchedulerOutput.__struct_fields__.index,
    (
        "num_draft_tokens",
        "copied_blocks",
        "added_pooling",
        "adapters",
        "features",
        "copied_states",
        "others",
        "saved_rows",
        "num_common_prefix_blocks",
        "scheduled_encoder_inputs",
        "freed_encoder_inputs",
        "image_parts",
    ),
)
_ADDED, _PARAMS = SchedulerOutput.__struct_fields__.index("added"), NewRow.__struct_fields__.index("params")
_DEFAULT_PARAMS = msgspec.structs.astuple(SamplingParams())
#: Sampling parameters that all captures have. Later ones are left out from the end if they have their defaults.
_NUM_FIRST_PARAMS = SamplingParams.__struct_fields__.index("skip_clone") + 1


def encode_plan(plan: SchedulerOutput) -> bytes:
    """Encode the plan with encode_fields()."""
    return encode_fields(plan_fields(plan))


def plan_fields(plan: SchedulerOutput) -> list[Any]:
    """Return the fields in order, with columns as bytes (int32, little-endian), as input for encode_fields()."""
    # Columns become bytes here, because the encoder's hook costs twice as much per column.
    columns = msgspec.structs.astuple(plan)
    return [one.tobytes() if type(one) is np.ndarray and one.dtype is _INT32 else one for one in columns]


def decided_fields(plan: SchedulerOutput) -> list[Any]:
    """Return plan_fields() without what follows from the others, or from a feature's content.

    Captures of engines that did not say it replay.
    """
    fields = plan_fields(plan)
    fields[_COMMON] = 0
    if plan.features:
        fields[_FEATURES] = [(row, list(map(_without_grid, uses))) for row, uses in plan.features]
    return fields


def encode_fields(fields: list[Any]) -> bytes:
    """Return the fields of a plan as msgpack. Equal plans give equal bytes.

    Fields added later are left out if they are empty, so that older captures replay to the same bytes. This applies to
    drafts, copies, pooling, adapters, features and what they are (whole, encoded, grids), copied states, blocks of
    further kinds of layers, saved states, common blocks, encoder inputs and their parts, and newer sampling parameters.
    """
    if fields[_ADDED]:
        fields = [*fields]
        fields[_ADDED] = list(map(_new_row_fields, fields[_ADDED]))
    if fields[_FEATURES]:
        fields = [*fields]
        fields[_FEATURES] = [(row, [_use_fields(use) for use in uses]) for row, uses in fields[_FEATURES]]
    for first in (
        *(_PARTS, _FREED, _ENCODED, _COMMON, _SAVED, _OTHERS, _STATES, _FEATURES, _ADAPTERS, _POOLING, _COPIES),
        _DRAFTS,
    ):
        if fields[first]:
            break
        fields = fields[:first]
    return _encoder.encode(fields)


def _new_row_fields(new: NewRow) -> list[Any]:
    fields = list(msgspec.structs.astuple(new))
    params = msgspec.structs.astuple(new.params)
    size = len(params)
    while size > _NUM_FIRST_PARAMS and params[size - 1] == _DEFAULT_PARAMS[size - 1]:
        size -= 1
    fields[_PARAMS] = params[:size]
    return fields


def _without_grid(use: FeatureUse) -> FeatureUse:
    return msgspec.structs.replace(use, num_columns=0)


def _use_fields(use: FeatureUse) -> tuple[int | bytes, ...]:
    fields = use.position, use.num_rows, use.digest
    if use.num_columns:
        return (*fields, use.is_whole, use.is_encoded, use.num_columns)
    if use.is_encoded:
        return (*fields, use.is_whole, use.is_encoded)
    return (*fields, use.is_whole) if use.is_whole else fields
