"""The options that edit a batch's logits before the temperature: their list, and the application of their edits."""

from collections.abc import Sequence

import torch

from core.sampling.allowed_tokens import AllowedTokens
from core.sampling.bad_words import BadWords
from core.sampling.edit_group import Edit, EditGroup
from core.sampling.logit_bias import LogitBias
from core.sampling.min_tokens import MinTokens
from core.sampling.penalties import Penalties


def edit_groups(num_rows: int, eos_token_ids: tuple[int, ...]) -> tuple[EditGroup, ...]:
    """Return one group for each option, in the order in which the edits are applied; the order is vLLM's.

    num_rows: rows of the runner's table.
    """
    return (AllowedTokens(), BadWords(), MinTokens(eos_token_ids), LogitBias(), Penalties(num_rows))


@torch.inference_mode()
def apply_edits(logits: torch.Tensor, edits: Sequence[Edit]) -> None:
    """Change logits [S, V] float32 in place, edit after edit."""
    for edit in edits:
        edit.apply(logits)
