"""The kinds of layers that a model has: those that see everything before a token, and those with a sliding window.

A kind is the index into everything that a step has once for each kind: windows, attention work, rotary tables.
"""

from core.models.config import ModelConfig


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of each kind of layer that the model has, tokens; None = everything."""
    num_sliding = len(config.sliding_layers)
    kinds = ((None, config.num_hidden_layers - num_sliding), (config.sliding_window, num_sliding))
    return tuple(window for window, num_layers in kinds if num_layers)


def kind_of(config: ModelConfig, layer: int) -> int:
    """The kind of the layer with this index."""
    return windows(config).index(config.sliding_window if layer in config.sliding_layers else None)
