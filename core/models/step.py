"""ModelInputs and StepResult: the input and the output of one forward pass of a model."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from core.models.operations.operations import AttentionWork
from core.models.operations.tensor import Tensor
from core.models.operations.token_adapters import TokenAdapters
from ipc.tables.arrays import Floats, Int32s, Ints
from kernels.memory.kv_cache import KVCache

#: The generation of inputs whose arrays are only used in one step.
ONCE = 0


class GivenRows(NamedTuple):
    """Embeddings that replace those of tokens of a step on a device, and what is added to their hidden states later."""

    places: Tensor  # [F] int64 indices of the tokens, ascending; then -1 for rows that are padding
    rows: Tensor  # [F, (1 + deep) * hidden] float32


class Begun(NamedTuple):
    """What later layers still read of a step's tokens, if earlier ones were run elsewhere."""

    token_ids: Ints  # [T]
    embeddings: Floats  # [T, hidden] float32


class ModelInputs(NamedTuple):
    """One step's T tokens, packed request after request; S of them get logits.

    The columns are NumPy arrays. The GPU's model runner has them on the device, as tensors.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64 block * block_size + offset; -1 = do not store
    attention: tuple[AttentionWork, ...]  # one per kind of layer
    cache: KVCache
    logits_rows: Tensor  # [S] int64 distinct token indices; may be empty
    #: Number of the arrays behind the inputs. Inputs with the previous step's generation have the same arrays, and the
    #: same columns behind the attention work, advanced by one token in each row. A model then keeps its pointers to
    #: them. No two makers of inputs use the same number.
    generation: int = ONCE
    adapters: TokenAdapters | None = None  # None: no token has one
    #: [.., (1 + deep) * hidden] float32: embeddings for token ids below 0, which are -1 - row, and what is added to
    #: their hidden states after the first layers. On a device GivenRows. None: there are none.
    given: Floats | GivenRows | None = None
    #: Where the recurrent states are: StateRows, or on a device kernels.triton.recurrence.DeviceStates. None: the model
    #: has none.
    requests: Any = None
    window_slots: Ints | None = None  # [T] slots in layers with a window; None: the same as the others'
    #: Positions by which heads are rotated: [T], or [T, 3] if a token of an image has three (config.rope_axes). None:
    #: `positions`.
    turned: Tensor | None = None
    #: If `given` is what earlier layers have made of the tokens, and layers have inputs of their own. None: it is not.
    begun: Begun | None = None


class StepResult(Protocol):
    """The result of a forward pass.

    It is valid until the model's next forward pass, and until attention work for another step is made.
    """

    @property
    def logits(self) -> Floats:
        """Return the logits [S, vocab] float32 of the inputs' logits_rows. The caller may overwrite them."""

    @property
    def largest(self) -> Int32s | None:
        """Return the index [S] of each row's largest logit, the lower one on a tie; negative if it is not finite.

        It refers to the logits as the step wrote them. None: the step did not compute it.
        """

    def logits_of(self, rows: Ints) -> Floats:
        """Compute the logits [n, vocab] float32 of other tokens of the step. The caller owns them.

        rows [n] int64: distinct indices of the step's tokens.
        """

    def hidden_of(self, rows: Ints) -> Floats:
        """Compute the hidden states after the final norm [n, hidden] float32. The caller owns them.

        rows [n] int64: distinct indices of the step's tokens.
        """


@runtime_checkable
class TappedResult(Protocol):
    """The further method of the results of a model whose hidden states are kept; see Llama.tap()."""

    def states_of(self, rows: Ints) -> Floats:
        """Return what tap() keeps [n, taps, hidden] float32 of these tokens [n] int64 of the step."""


class HiddenResult:
    """The result of a model that runs operation by operation. It has the last layer's output for all tokens."""

    largest = None

    def __init__(
        self,
        rows: Ints,
        vocab_size: int,
        to_logits: Callable[[Ints], Floats],
        to_hidden: Callable[[Ints], Floats],
    ) -> None:
        """Compute the logits of these rows [S] int64. to_logits, to_hidden: compute logits_of() and hidden_of()."""
        self._to_logits, self._to_hidden = to_logits, to_hidden
        self.logits = to_logits(rows) if len(rows) else np.empty((0, vocab_size), np.float32)

    def logits_of(self, rows: Ints) -> Floats:
        """Compute the logits [n, vocab] float32 of these tokens."""
        return self._to_logits(rows)

    def hidden_of(self, rows: Ints) -> Floats:
        """Compute the hidden states [n, hidden] float32 of these tokens, after the final norm."""
        return self._to_hidden(rows)
