"""The kinds of layers of a model: layers with full attention and layers with a sliding window.

A kind is an index into the data that a step has once for each kind: windows, attention work, rotary tables.
"""

from core.models.config import ModelConfig


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Return the window of each kind of layer that the model has, in tokens; None = all earlier tokens."""
    num_sliding = len(config.sliding_layers)
    kinds = ((None, config.num_hidden_layers - num_sliding), (config.sliding_window, num_sliding))
    return tuple(window for window, num_layers in kinds if num_layers)


def kind_of(config: ModelConfig, layer: int) -> int:
    """Return the kind of the layer with this index."""
    return windows(config).index(config.sliding_window if layer in config.sliding_layers else None)
