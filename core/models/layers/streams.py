"""LayerStreams: hidden states in several streams, of which each layer reads one and corrects all (Gemma 3n).

They are AltUp's (Baykal et al. 2023, arXiv 2301.13310). A learned residual is next to attention (LAuReL: Menghani et
al. 2024, arXiv 2411.07501).

A layer predicts all streams from those before it; coefficients that a router makes of the active stream say how. It
runs on the active one, and what it changes there corrects the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.models.config import ModelConfig, StreamParts
from core.models.operations.operations import Norm, Operations, Product
from core.models.operations.stream_arithmetic import StreamArithmetic, StreamMixer, StreamOperations, Streams
from core.models.operations.tensor import Tensor
from core.models.parts.weight_parts import WeightParts
from kernels.elements import FLOAT32, Dtype


@dataclass(frozen=True)
class LayerStreams:
    """How one layer predicts and corrects streams, and what is added to its attention's output."""

    router_norm: Norm
    router: Product
    mixer: StreamMixer
    active: int
    left: Product
    right: Product
    residual_norm: Norm  # to float32

    @property
    def products(self) -> dict[str, Product]:
        """Return the products by name."""
        return {"stream_router": self.router, "left": self.left, "right": self.right}

    def predict(self, streams: Streams) -> Streams:
        """Return the streams before the layer, from those after the layer before."""
        return self.mixer.predict(streams, self._routed(streams[self.active]))

    def correct(self, predicted: Streams, after: Tensor) -> Streams:
        """Return the streams after the layer, which has made `after` [T, d] of the active one."""
        return self.mixer.correct(predicted, self._routed(after), after)

    def residual(self, x: Tensor) -> Tensor:
        """Return what is added to attention's output, next to x itself [T, d] float32. x: what attention reads."""
        return self.residual_norm(self.right(self.left(x)))

    def _routed(self, stream: Tensor) -> Tensor:
        return self.router(self.router_norm(stream))


@dataclass
class ModelStreams:
    """What makes all streams of embeddings, and one of all streams."""

    #: Of the streams but the first, from embeddings; none if the layers are not a model's first.
    before: Sequence[Product]
    after: Sequence[Product]  # of the same, to the model's output; none if the layers are not the last
    arithmetic: StreamArithmetic

    def begin(self, hidden: Tensor) -> Streams:
        """Return the streams of embeddings [T, d] float32."""
        return self.arithmetic.begin(hidden, self.before)

    def end(self, streams: Streams) -> Tensor:
        """Return the model's output [T, d] float32 before its final norm."""
        return self.arithmetic.end(streams, self.after)


def build_streams(
    operations: Operations, parts: WeightParts, config: ModelConfig, *, has_first: bool = True, has_last: bool = True
) -> ModelStreams | None:
    """Build what a model with several streams has around its layers; None for others.

    has_first, has_last: whether the first and the last layer are among these. Errors: ModelFileError naming missing
    tensors.
    """
    if config.streams is None:
        return None
    assert isinstance(operations, StreamOperations), type(operations)
    before, after = (
        [
            operations.linear(parts.take_matrix(f"model.{name}.{number}.weight"), out_dtype=FLOAT32)
            for number in range(config.streams.count - 1 if is_needed else 0)
        ]
        for name, is_needed in (("stream_projections", has_first), ("stream_outputs", has_last))
    )
    return ModelStreams(before, after, operations.streams())


def build_layer_streams(
    operations: Operations, parts: WeightParts, config: ModelConfig, own: StreamParts, index: int, dtype: Dtype
) -> LayerStreams:
    """Build the streams' part of the layer with this index. Errors: ModelFileError naming missing tensors."""
    assert isinstance(operations, StreamOperations), type(operations)
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
        operations.streams().mixer(
            np.array(prediction, np.float32).reshape(count, count, count),
            np.array(correction, np.float32),
            own.active,
            scale if own.scales_active else None,
        ),
        own.active,
        left,
        right,
        operations.norm(residual_norm, config.rms_norm_eps, FLOAT32),
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
