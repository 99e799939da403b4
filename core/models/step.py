"""ModelInputs and StepResult: the input and the output of one forward pass of a model."""

from typing import NamedTuple, Protocol

import torch

from core.models.operations import AttentionWork
from ipc.arrays import Int32s
from kernels.memory.kv_cache import KVCache
from kernels.torch.linear import Operation

#: The generation of inputs whose arrays are used in one step only.
ONCE = 0


class ModelInputs(NamedTuple):
    """One step's T tokens, packed request after request; S of them get logits."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64 block * block_size + offset; -1 = do not store
    attention: tuple[AttentionWork, ...]  # one for each kind of layer
    cache: KVCache
    logits_rows: torch.Tensor  # [S] int64 distinct indices of tokens; may be empty
    #: Number of the arrays behind the inputs. Inputs with the previous step's generation have the same tensors, and the
    #: same columns behind the attention work, advanced by one token in each row. A model then keeps its pointers to
    #: them. No two makers of inputs use the same number.
    generation: int = ONCE


class StepResult(Protocol):
    """The result of a forward pass.

    It is valid until the model's next forward pass, and until attention work for another step is made.
    """

    @property
    def logits(self) -> torch.Tensor:
        """Logits [S, vocab] float32 of the inputs' logits_rows. The caller may overwrite them."""

    @property
    def largest(self) -> Int32s | None:
        """Index [S] of each row's largest logit, ties by lower index; negative where it is not finite.

        It refers to the logits as the step wrote them. None: the step did not compute it.
        """

    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the logits [n, vocab] float32 of other tokens of the step; the caller owns them.

        rows [n] int64: distinct indices of the step's tokens.
        """

    def hidden_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states after the final norm [n, hidden] float32; the caller owns them.

        rows [n] int64: distinct indices of the step's tokens.
        """


class HiddenResult:
    """The result of a model that runs operation after operation: it has the last layer's output of all tokens."""

    largest = None

    def __init__(
        self, hidden: torch.Tensor, rows: torch.Tensor, vocab_size: int, to_logits: Operation, to_normalised: Operation
    ) -> None:
        """Compute the logits of these rows [S] int64 of hidden [>= T, hidden].

        to_logits: from rows of hidden to logits, float32. to_normalised: from rows of hidden to the output of the final
        norm, float32.
        """
        self._hidden, self._to_logits, self._to_normalised = hidden, to_logits, to_normalised
        if len(rows):
            self.logits = self.logits_of(rows)
        else:
            self.logits = hidden.new_empty((0, vocab_size), dtype=torch.float32)

    @torch.inference_mode()
    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the logits [n, vocab] float32 of these tokens."""
        return self._to_logits(self._picked(rows))

    @torch.inference_mode()
    def hidden_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states [n, hidden] float32 of these tokens, after the final norm."""
        return self._to_normalised(self._picked(rows))

    def _picked(self, rows: torch.Tensor) -> torch.Tensor:
        return self._hidden.index_select(0, rows.to(self._hidden.device))
