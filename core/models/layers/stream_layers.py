"""run_layers: runs the layers of a model whose hidden states are in several streams (core/models/layers/streams.py)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.models.layers.layer import Layer
from core.models.layers.streams import Streams
from core.models.operations.operations import PerLayerInputs
from ipc.tables.arrays import Floats, Ints

_ROOT_HALF = np.float32(0.5**0.5)


def run_layers(
    layers: Sequence[Layer], streams: Streams, hidden: Floats, step: Any, inputs: PerLayerInputs, ids: Ints
) -> Floats:
    """Run the layers on embeddings [T, d] float32; return the model's output [T, d] float32 before its final norm.

    step: see Operations.step(). inputs: of single layers, for the tokens ids [T].
    """
    projected, every = inputs.project(hidden), streams.begin(hidden)
    for index, layer in enumerate(layers):
        own = layer.streams
        assert own is not None, index
        assert layer.mlp is not None, index
        assert layer.own_inputs is not None, index
        predicted = own.predict(every)
        active = predicted[own.active]
        x = layer.input_norm(active)
        attended = (active + layer.attention_out(layer.mixer(x, step)) + own.residual(x)) * _ROOT_HALF
        after = attended + layer.mlp_out(layer.mlp(layer.mlp_norm(attended)))
        every = own.correct(predicted, after)
        gated = every[own.active] if own.active_scale is None else every[own.active] * own.active_scale
        added = layer.own_inputs(gated, inputs, ids, projected, index)
        every = [every[0], *(stream + added for stream in every[1:])]
    return streams.end(every)
