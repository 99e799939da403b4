"""ModelInputs and StepResult: what one forward pass of a model takes and gives."""

from typing import NamedTuple, Protocol

import torch

from core.models.operations import AttentionWork
from ipc.arrays import Int32s
from kernels.memory.kv_cache import KVCache
from kernels.torch.linear import Operation

#: The generation of inputs whose arrays are used in one step alone.
ONCE = 0


class ModelInputs(NamedTuple):
    """One step's T tokens, packed request after request, of which S get logits."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64 block * block_size + offset; -1 = do not store
    attention: tuple[AttentionWork, ...]  # one for each kind of layer
    cache: KVCache
    logits_rows: torch.Tensor  # [S] int64 different indices of tokens; may be empty
    #: Number of the arrays behind a step's inputs. Inputs of the generation of the step before are that step's, moved
    #: on by one token for each row: the same tensors, and the same columns behind the attention work, with other
    #: numbers in them. A model keeps its pointers to them then. A number is used by one maker of inputs alone.
    generation: int = ONCE


class StepResult(Protocol):
    """What a forward pass gave. Good until the model's next one, and until attention work for another step is made."""

    @property
    def logits(self) -> torch.Tensor:
        """[S, vocab] float32 of the inputs' logits_rows. The caller may write into it."""

    @property
    def largest(self) -> Int32s | None:
        """[S] index of each row's largest logit as the step wrote it, the lowest of equals; negative where it is not
        finite. None: the step did not look for it."""

    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute logits [n, vocab] float32 of other tokens of the step: rows [n] int64, different indices of its
        tokens. They are the caller's."""

    def hidden_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states behind the final norm [n, hidden] float32 of tokens of the step: rows [n] int64,
        different indices of its tokens. They are the caller's."""


class HiddenResult:
    """The result of a model that runs operation after operation: the last layer's output of all tokens is there."""

    largest = None

    def __init__(
        self, hidden: torch.Tensor, rows: torch.Tensor, vocab_size: int, to_logits: Operation, to_normalised: Operation
    ) -> None:
        """hidden [>= T, hidden]; rows [S] int64: the tokens whose logits are computed at once. to_logits: rows of
        hidden -> logits float32; to_normalised: rows of hidden -> what stands behind the final norm, float32."""
        self._hidden, self._to_logits, self._to_normalised = hidden, to_logits, to_normalised
        if len(rows):
            self.logits = self.logits_of(rows)
        else:
            self.logits = hidden.new_empty((0, vocab_size), dtype=torch.float32)

    @torch.inference_mode()
    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        return self._to_logits(self._picked(rows))

    @torch.inference_mode()
    def hidden_of(self, rows: torch.Tensor) -> torch.Tensor:
        return self._to_normalised(self._picked(rows))

    def _picked(self, rows: torch.Tensor) -> torch.Tensor:
        return self._hidden.index_select(0, rows.to(self._hidden.device))
