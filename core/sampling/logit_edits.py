"""The options that edit a batch's logits before the temperature: their list, and how their edits are applied."""

from collections.abc import Sequence

import numpy as np

from core.grammars.matchers import RowMatchers
from core.sampling.allowed_tokens import AllowedTokens
from core.sampling.bad_words import BadWords
from core.sampling.edit_group import Edit, EditGroup, Logits
from core.sampling.logit_bias import LogitBias
from core.sampling.min_tokens import MinTokens
from core.sampling.penalties import Penalties
from core.sampling.structured_outputs import StructuredOutputs
from core.sampling.top_n_sigma import TopNSigma
from core.sampling.typical import Typical
from core.sampling.xtc import Xtc
from ipc.tables.arrays import Int32s
from kernels.cpu.sampling import UNKNOWN
from kernels.cpu.token_masks import CpuTokenMasks


def edit_groups(
    num_rows: int,
    eos_token_ids: tuple[int, ...],
    matchers: RowMatchers | None = None,
    masks: CpuTokenMasks | None = None,
) -> tuple[EditGroup, ...]:
    """Return one group per option, in the order in which the edits are applied.

    The order is vLLM's, and llama.cpp's for its options. Xtc is last, because it applies the filters.

    num_rows: rows of the runner's table. matchers: for structured_outputs; None = no request has them. masks: the C
    kernel for them; None = NumPy.
    """
    structured = () if matchers is None else (StructuredOutputs(matchers, masks),)
    forbidding = (*structured, AllowedTokens(), BadWords(), MinTokens(eos_token_ids))
    return (*forbidding, LogitBias(), Penalties(num_rows), TopNSigma(num_rows), Typical(num_rows), Xtc(num_rows))


@np.errstate(all="ignore")  # logits that are not finite are reported by the sampler
def apply_edits(logits: Logits, edits: Sequence[Edit]) -> None:
    """Change logits [S, V] float32 in place, edit after edit."""
    for edit in edits:
        edit.apply(logits)


def largest_after(largest: Int32s, edits: Sequence[Edit]) -> Int32s:
    """Return the index [S] of each sample's largest logit after these edits; UNKNOWN if it may have changed.

    largest [S]: the index before them, the first on a tie; below 0 if that logit is not finite. If an edit keeps the
    largest logit, it stays the largest and the first on a tie, because edits that raise a logit report that they may
    move it.
    """
    known = np.where(largest < 0, UNKNOWN, largest).astype(np.int32)
    for edit in edits:
        known[edit.moves(known)] = UNKNOWN
    return known
