"""run_layers: runs the layers of a model whose hidden states are in several streams (core/models/layers/streams.py)."""

from collections.abc import Sequence
from typing import Any

from core.models.layers.layer import Layer
from core.models.layers.streams import ModelStreams
from core.models.operations.operations import PerLayerInputs
from core.models.operations.tensor import Tensor


def run_layers(
    layers: Sequence[Layer], streams: ModelStreams, hidden: Tensor, step: Any, inputs: PerLayerInputs, ids: Tensor
) -> Tensor:
    """Run the layers on embeddings [T, d] float32; return the model's output [T, d] float32 before its final norm.

    step: see Operations.step(). inputs: of single layers, for the tokens ids [T].
    """
    arithmetic, projected = streams.arithmetic, inputs.project(hidden)
    every = streams.begin(hidden)
    for index, layer in enumerate(layers):
        own = layer.streams
        assert own is not None, index
        assert layer.mlp is not None, index
        assert layer.own_inputs is not None, index
        predicted = own.predict(every)
        active = predicted[own.active]
        x = layer.input_norm(active)
        attended = arithmetic.joined(active, layer.attention_out(layer.mixer(x, step)), x, own.residual(x))
        after = attended + layer.mlp_out(layer.mlp(layer.mlp_norm(attended)))
        every = own.correct(predicted, after)
        added = layer.own_inputs(own.mixer.gated(every), inputs, ids, projected, index)
        every = arithmetic.with_added(every, added)
    return streams.end(every)
