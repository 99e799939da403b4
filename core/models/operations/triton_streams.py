"""TritonStreams: the arithmetic of hidden states in several streams on a device. Import it only for device=cuda."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from core.models.operations.tensor import Operation
from ipc.tables.arrays import Floats
from kernels.torch.tensors import to_tensor
from kernels.triton.streams.mixing import corrected, joined, predicted, resized
from kernels.triton.streams.sparse_gate import sparse_gated


@dataclass(frozen=True)
class TritonStreamMixer:
    """A StreamMixer. The methods are documented there, the fields at StreamArithmetic.mixer(), which has them."""

    prediction: torch.Tensor
    correction: torch.Tensor
    active: int
    scale: torch.Tensor | None

    def predict(self, streams: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """Return the streams before the layer."""
        return predicted(streams, routed, self.prediction)

    def correct(self, streams: torch.Tensor, routed: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Return the streams after the layer."""
        return corrected(streams, routed, self.correction, after, self.active)

    def gated(self, streams: torch.Tensor) -> torch.Tensor:
        """Return what the gate of the layer's own inputs reads."""
        return streams[self.active] if self.scale is None else streams[self.active] * self.scale


class TritonStreams:
    """A StreamArithmetic. The methods are documented there."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: the model's."""
        self._dtype, self._device = dtype, device

    def mixer(self, prediction: Floats, correction: Floats, active: int, scale: Floats | None) -> TritonStreamMixer:
        """Return a layer's mixer."""
        sent, own = (to_tensor(one).to(self._device, copy=True) for one in (prediction, correction))
        return TritonStreamMixer(
            sent, own, active, None if scale is None else to_tensor(scale).to(self._device, copy=True)
        )

    def begin(self, hidden: torch.Tensor, products: Sequence[Operation]) -> torch.Tensor:
        """Return the streams of embeddings."""
        x = hidden.to(self._dtype)
        streams = hidden.new_empty(1 + len(products), *hidden.shape)
        streams[0] = hidden
        for product, stream in zip(products, streams[1:], strict=True):
            resized(product(x), hidden, stream)
        return streams

    def end(self, streams: torch.Tensor, products: Sequence[Operation]) -> torch.Tensor:
        """Return the mean."""
        first, total, last = streams[0], streams[0], len(products)
        for number, (product, stream) in enumerate(zip(products, streams[1:], strict=True), 1):
            x = product(stream.to(self._dtype))
            total = resized(x, first, torch.empty_like(first), total, len(streams) if number == last else 1)
        return total

    def joined(
        self, active: torch.Tensor, attended: torch.Tensor, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum times the root of a half."""
        return joined(active, attended, x, residual)

    def with_added(self, streams: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Return the streams, all but the first plus `added`, in place."""
        streams[1:] += added
        return streams

    def sparse_gate(self, num_deviations: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the function of gate and up."""
        return partial(sparse_gated, num_deviations=num_deviations, dtype=self._dtype)
