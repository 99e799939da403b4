"""The kinds of layers of a model: what a step needs once for all layers of a kind.

A kind's number is an index into the data that a step has once per kind: windows, attention work, rotary tables.
"""

from typing import NamedTuple

from core.models.config import ModelConfig


class LayerKind(NamedTuple):
    """What a layer's attention sees, and whether it uses positions."""

    window: int | None  # tokens; None = all earlier ones
    is_rotated: bool


def layers(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Return the kind of each layer."""
    return tuple(
        LayerKind(
            config.sliding_window if layer in config.sliding_layers else None, layer not in config.unrotated_layers
        )
        for layer in range(config.num_hidden_layers)
    )


def kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Return the model's kinds of layers with attention, those without a window first."""
    having = {kind for layer, kind in enumerate(layers(config)) if layer not in config.recurrent_layers}
    return tuple(sorted(having, key=lambda kind: (kind.window is not None, not kind.is_rotated)))


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Return the window of each kind of layer of the model, in tokens; None = all earlier tokens."""
    return tuple(kind.window for kind in kinds(config))


def kind_of(config: ModelConfig, layer: int) -> int:
    """Return the number of the kind of the layer with this index; 0 for one without attention."""
    return 0 if layer in config.recurrent_layers else kinds(config).index(layers(config)[layer])
