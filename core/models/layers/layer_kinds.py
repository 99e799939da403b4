"""The kinds of layers of a model: what a step needs once for all layers of a kind.

A kind's number is an index into the data that a step has once per kind: windows, attention work, rotary tables.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from core.models.config import HeadSizes, ModelConfig


class LayerKind(NamedTuple):
    """What the attention of a layer sees, whether it knows positions, and how large its heads are."""

    window: int | None  # tokens; None = all earlier ones
    is_rotated: bool
    heads: HeadSizes


@lru_cache(4)
def layers(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Return the kind of each layer."""
    has_table = config.encoder is not None and config.adds_places
    return tuple(
        LayerKind(
            config.sliding_window if layer in config.sliding_layers else None,
            layer not in config.unrotated_layers and not has_table,
            config.heads_of(layer),
        )
        for layer in range(config.num_hidden_layers)
    )


@lru_cache(4)
def kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Return the model's kinds of layers with attention, those without a window first."""
    having = {kind for layer, kind in enumerate(layers(config)) if layer not in config.recurrent_layers}
    return tuple(sorted(having, key=lambda kind: (kind.window is not None, not kind.is_rotated)))


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Return the window of each kind of layer of the model, in tokens; None = all earlier tokens."""
    return tuple(kind.window for kind in kinds(config))


def places(config: ModelConfig) -> tuple[int, ...]:
    """Return, for each kind of layer that the model has, the place of one layer's K and V among the caches."""
    every = layers(config)
    attending = [layer for layer in range(len(every)) if layer not in config.recurrent_layers]
    return tuple(config.place_of(next(one for one in attending if every[one] == kind)) for kind in kinds(config))


def cached_layers(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Return the kinds of the layers that have K and V, in the order of their places among the caches.

    If a step computes whole prompts, each layer may overwrite the K and V of an earlier one with heads of its size.
    """
    if not config.is_causal:
        return tuple({kind.heads: kind for kind in reversed(layers(config))}[heads] for heads in config.head_sizes)
    without = config.recurrent_layers
    return tuple(
        kind
        for layer, kind in enumerate(layers(config))
        if layer not in without and config.value_form(layer) != "shared"
    )


def places_of_parts(heads: Sequence[HeadSizes]) -> list[tuple[int, int]]:
    """Return, for layers with these heads, the number of their size, by first use, and their place among its layers."""
    sizes = list(dict.fromkeys(heads))
    return [(sizes.index(each), heads[:index].count(each)) for index, each in enumerate(heads)]


def kind_of(config: ModelConfig, layer: int) -> int:
    """Return the number of the kind of the layer with this index; 0 for one without attention."""
    return 0 if layer in config.recurrent_layers else kinds(config).index(layers(config)[layer])
