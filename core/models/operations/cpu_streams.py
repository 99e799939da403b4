"""CpuStreams: the arithmetic of hidden states in several streams with arrays in host memory.

Sums over a row are NumPy's in float64, and each operation rounds once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from core.models.operations.tensor import Operation, Tensor
from ipc.tables.arrays import Floats
from kernels.cpu.elementwise import cap_logits
from kernels.cpu.library import CpuLibrary
from kernels.elements import Dtype, Numbers, rounded, to_floats

_LEAST_SQUARE = 1e-5  # of a stream that is scaled: the mean of its squares counts as at least this
_ROOT_HALF = np.float32(0.5**0.5)


@dataclass(frozen=True)
class CpuStreamMixer:
    """A StreamMixer. The methods are documented there, the fields at StreamArithmetic.mixer()."""

    prediction: Floats
    correction: Floats
    active: int
    scale: Floats | None
    library: CpuLibrary

    def predict(self, streams: Sequence[Floats], routed: Floats) -> list[Floats]:
        """Return the streams before the layer."""
        routed = _tanh(self.library, routed)
        predicted = []
        for own, before in zip(self.prediction, streams, strict=True):
            total = before
            for coefficients, stream in zip(own, streams, strict=True):
                total = total + stream * _weighted(routed, coefficients)
            predicted.append(total)
        return predicted

    def correct(self, predicted: Sequence[Floats], routed: Floats, after: Floats) -> list[Floats]:
        """Return the streams after the layer."""
        routed, change = _tanh(self.library, routed), after - predicted[self.active]
        return [
            before + change * (_weighted(routed, own) + np.float32(1))
            for own, before in zip(self.correction, predicted, strict=True)
        ]

    def gated(self, streams: Sequence[Floats]) -> Floats:
        """Return what the gate of the layer's own inputs reads."""
        return streams[self.active] if self.scale is None else streams[self.active] * self.scale


class CpuStreams:
    """A StreamArithmetic. The methods are documented there."""

    def __init__(self, library: CpuLibrary, dtype: Dtype) -> None:
        self._library, self._dtype = library, dtype

    def mixer(self, prediction: Floats, correction: Floats, active: int, scale: Floats | None) -> CpuStreamMixer:
        """Return a layer's mixer."""
        return CpuStreamMixer(prediction, correction, active, scale, self._library)

    def begin(self, hidden: Floats, products: Sequence[Operation]) -> list[Floats]:
        """Return the streams of embeddings."""
        x, size = rounded(hidden, self._dtype), _size(hidden)
        return [hidden, *(_of_size(product(x), size) for product in products)]

    def end(self, streams: Sequence[Floats], products: Sequence[Operation]) -> Floats:
        """Return the mean."""
        total, size = streams[0], _size(streams[0])
        for product, stream in zip(products, streams[1:], strict=True):
            total = total + _of_size(product(rounded(stream, self._dtype)), size)
        return total / np.float32(len(streams))

    def joined(self, active: Floats, attended: Floats, x: Tensor, residual: Floats) -> Floats:
        """Return the sum times the root of a half."""
        total: Floats = (active + attended + (to_floats(x) + residual)) * _ROOT_HALF
        return total

    def with_added(self, streams: Sequence[Floats], added: Floats) -> list[Floats]:
        """Return the streams, all but the first plus `added`."""
        return [streams[0], *(stream + added for stream in streams[1:])]

    def sparse_gate(self, num_deviations: float) -> Callable[[Floats, Floats], Numbers]:
        """Return the function of gate and up."""

        def gated(gate: Floats, up: Floats) -> Numbers:
            gates = gate.astype(np.float64)
            mean = gates.sum(1, keepdims=True) / gates.shape[1]
            deviation = np.sqrt(((gates - mean) ** 2).sum(1, keepdims=True) / gates.shape[1])
            left = np.maximum(gates - (mean + deviation * num_deviations), 0.0).astype(np.float32)
            inner = (left + left * left * left * np.float32(0.044715)) * np.float32((2 / np.pi) ** 0.5)
            gelu = left * (np.float32(0.5) + np.float32(0.5) * _tanh(self._library, inner))
            return rounded(gelu * up, self._dtype)

        return gated


def _tanh(library: CpuLibrary, numbers: Floats) -> Floats:
    """Return tanh of numbers float32, in place."""
    cap_logits(library, numbers, 1.0)
    return numbers


def _weighted(routed: Floats, coefficients: Floats) -> Floats:
    """Return the sum [T, 1] of a router's numbers [T, count] times coefficients [count], in turn."""
    total: Floats = routed[:, :1] * coefficients[0]
    for index in range(1, len(coefficients)):
        total = total + routed[:, index : index + 1] * coefficients[index]
    return total


def _squares(x: Floats) -> Floats:
    wide = x.astype(np.float64)
    mean: Floats = (wide * wide).sum(1, keepdims=True) / x.shape[1]
    return mean


def _size(x: Floats) -> Floats:
    """Return the root of the mean square [T, 1] of each row, float64."""
    size: Floats = np.sqrt(_squares(x))
    return size


def _of_size(x: Floats, size: Floats) -> Floats:
    """Return x [T, d] with rows of this size [T, 1]."""
    scaled: Floats = x * (size / np.sqrt(np.maximum(_squares(x), _LEAST_SQUARE))).astype(np.float32)
    return scaled
