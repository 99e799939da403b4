"""StreamArithmetic: what a model whose hidden states are in several streams computes next to products and norms.

core/models/layers/streams.py says what the streams are. All numbers are those of one token.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from core.models.operations.tensor import Operation, Tensor
from ipc.tables.arrays import Floats

#: The streams of a step, each [T, d] float32: a list of arrays, or on a device a tensor [streams, T, d].
Streams: TypeAlias = Any


class StreamMixer(Protocol):
    """How one layer predicts and corrects streams. The numbers of a router [T, streams] are before their tanh."""

    def predict(self, streams: Streams, routed: Tensor) -> Streams:
        """Return the streams before the layer, from those after the layer before. routed: of the active one."""

    def correct(self, predicted: Streams, routed: Tensor, after: Tensor) -> Streams:
        """Return the streams after the layer, which made `after` [T, d] of the active one. routed: of `after`."""

    def gated(self, streams: Streams) -> Tensor:
        """Return what the gate of the layer's own inputs reads [T, d]: the active stream, perhaps scaled."""


class StreamArithmetic(Protocol):
    """The operations of such a model."""

    def mixer(self, prediction: Floats, correction: Floats, active: int, scale: Floats | None) -> StreamMixer:
        """Return a layer's mixer.

        prediction [streams, streams, streams]: of each stream, of the stream that it is made from, by the router's
        numbers. correction [streams, streams]: of each stream, by the router's numbers. active: the stream that the
        layer reads. scale [d]: of what the gate reads; None = it is not scaled.
        """

    def begin(self, hidden: Tensor, products: Sequence[Operation]) -> Streams:
        """Return the streams of embeddings [T, d] float32: these, then each product of them, of the first one's size.

        Products are to float32.
        """

    def end(self, streams: Streams, products: Sequence[Operation]) -> Tensor:
        """Return the mean [T, d] float32 of the first stream and of the others' products, each of the first's size."""

    def joined(self, active: Tensor, attended: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        """Return the sum of all [T, d] times the root of a half, float32. x is of the model's dtype."""

    def with_added(self, streams: Streams, added: Tensor) -> Streams:
        """Return the streams, all but the first plus `added` [T, d]. The given ones may be overwritten."""

    def sparse_gate(self, num_deviations: float) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function (gate [T, I], up [T, I]) -> gelu(max(gate - cut, 0)) * up, of the model's dtype.

        Both are float32. cut: the mean of a row's gates and so many standard deviations. gelu is its tanh form.
        """


@runtime_checkable
class StreamOperations(Protocol):
    """The further method of operations of models with several streams."""

    def streams(self) -> StreamArithmetic:
        """Return the arithmetic of streams."""
