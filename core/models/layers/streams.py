"""LayerStreams: hidden states in several streams, of which each layer reads one and corrects all (Gemma 3n).

They are AltUp's (Baykal et al. 2023, arXiv 2301.13310). A learned residual is next to attention (LAuReL: Menghani et
al. 2024, arXiv 2411.07501).

A layer predicts all streams from those before it; coefficients that a router makes of the active stream say how. It
runs on the active one, and what it changes there corrects the others. All numbers are those of one token: sums over a
row are NumPy's in float64, and each operation rounds once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.models.config import ModelConfig, StreamParts
from core.models.operations.operations import HostOperations, Norm, Operations, Product
from core.models.operations.tensor import Tensor
from core.models.parts.weight_parts import WeightParts
from ipc.tables.arrays import Floats
from kernels.elements import FLOAT32, Dtype, to_floats

_LEAST_SQUARE = 1e-5  # of a stream that is scaled: the mean of its squares counts as at least this


@dataclass(frozen=True)
class LayerStreams:
    """How one layer predicts and corrects streams, and what is added to its attention's output."""

    router_norm: Norm
    router: Product
    #: [count, count, count]: of each stream, of the stream that it is made from, by the router's numbers
    prediction: Floats
    correction: Floats  # [count, count]: of each stream, by the router's numbers
    active: int
    active_scale: Floats | None  # [d] of what the gate of the layer's own inputs reads
    left: Product
    right: Product
    residual_norm: Norm  # to float32
    operations: HostOperations

    @property
    def products(self) -> dict[str, Product]:
        """Return the products by name."""
        return {"stream_router": self.router, "left": self.left, "right": self.right}

    def predict(self, streams: Sequence[Floats]) -> list[Floats]:
        """Return the streams [T, d] before the layer, from those after the layer before."""
        routed = self._routed(streams[self.active])
        predicted = []
        for own, before in zip(self.prediction, streams, strict=True):
            total = before
            for coefficients, stream in zip(own, streams, strict=True):
                total = total + stream * _weighted(routed, coefficients)
            predicted.append(total)
        return predicted

    def correct(self, predicted: Sequence[Floats], after: Floats) -> list[Floats]:
        """Return the streams after the layer, which has made `after` [T, d] of the active one."""
        routed, change = self._routed(after), after - predicted[self.active]
        return [
            before + change * (_weighted(routed, own) + np.float32(1))
            for own, before in zip(self.correction, predicted, strict=True)
        ]

    def residual(self, x: Tensor) -> Floats:
        """Return what is added to attention's output [T, d] float32. x: what attention reads."""
        found: Floats = to_floats(x) + self.residual_norm(self.right(self.left(x)))
        return found

    def _routed(self, stream: Floats) -> Floats:
        return self.operations.capped(self.router(self.router_norm(stream)), 1.0)


@dataclass(frozen=True)
class Streams:
    """What makes all streams of embeddings, and one of all streams."""

    before: Sequence[Product]  # of the streams but the first, from embeddings
    after: Sequence[Product]  # of the same, to the model's output
    operations: HostOperations

    def begin(self, hidden: Floats) -> list[Floats]:
        """Return the streams [T, d] float32 of embeddings, which become the first one."""
        x, size = self.operations.rounded(hidden), _size(hidden)
        return [hidden, *(_of_size(product(x), size) for product in self.before)]

    def end(self, streams: Sequence[Floats]) -> Floats:
        """Return the mean of the streams [T, d] float32, each of the first one's size."""
        total, size = streams[0], _size(streams[0])
        for product, stream in zip(self.after, streams[1:], strict=True):
            total = total + _of_size(product(self.operations.rounded(stream)), size)
        return total / np.float32(len(streams))


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


def build_streams(operations: Operations, parts: WeightParts, config: ModelConfig) -> Streams | None:
    """Build what a model with several streams has around its layers; None for others.

    Errors: ModelFileError naming missing tensors.
    """
    if config.streams is None:
        return None
    assert isinstance(operations, HostOperations), type(operations)
    before, after = (
        [
            operations.linear(parts.take_matrix(f"model.{name}.{number}.weight"), out_dtype=FLOAT32)
            for number in range(config.streams.count - 1)
        ]
        for name in ("stream_projections", "stream_outputs")
    )
    return Streams(before, after, operations)


def build_layer_streams(
    operations: Operations, parts: WeightParts, config: ModelConfig, own: StreamParts, index: int, dtype: Dtype
) -> LayerStreams:
    """Build the streams' part of the layer with this index. Errors: ModelFileError naming missing tensors."""
    assert isinstance(operations, HostOperations), type(operations)
    prefix, count = f"model.layers.{index}.", own.count
    # What the router reads is divided by the width.
    norm = parts.take(f"{prefix}streams.router_norm.weight") / np.float32(config.hidden_size)
    router = operations.router(parts.take_matrix(f"{prefix}streams.router.weight"))
    prediction = parts.take_matrix(f"{prefix}streams.prediction.weight").dense(FLOAT32)
    correction = parts.take_matrix(f"{prefix}streams.correction.weight").dense(FLOAT32)
    scale = parts.take(f"{prefix}streams.scale.weight")
    left, right = (
        operations.linear(parts.take_matrix(f"{prefix}residual.{name}.weight")) for name in ("left", "right")
    )
    residual_norm = parts.take(f"{prefix}residual.norm.weight")
    return LayerStreams(
        operations.norm(norm, config.rms_norm_eps, dtype),
        router,
        np.array(prediction, np.float32).reshape(count, count, count),
        np.array(correction, np.float32),
        own.active,
        scale if own.scales_active else None,
        left,
        right,
        operations.norm(residual_norm, config.rms_norm_eps, FLOAT32),
        operations,
    )


def stream_shapes(own: StreamParts, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a layer's streams by name, without the layer's prefix."""
    return {
        "streams.router_norm.weight": (hidden,),
        "streams.router.weight": (own.count, hidden),
        "streams.prediction.weight": (own.count**2, own.count),
        "streams.correction.weight": (own.count, own.count),
        "streams.scale.weight": (hidden,),
        "residual.left.weight": (own.rank, hidden),
        "residual.right.weight": (hidden, own.rank),
        "residual.norm.weight": (hidden,),
    }
