"""Stage: the part of a model that some workers of a pipeline compute: consecutive layers.

A stage gets the residual stream from the previous stage, and passes it on. No sum crosses stages, so every number has
the same bits as in one process, for any number of stages.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from core.models.config import ModelConfig
from core.models.grid_parts import GridParts
from core.models.operations.stored_matrix import Weight
from core.models.parts.ranges import Range
from core.models.parts.stage_link import StageLink
from ipc.errors import ConfigError

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDINGS, _PLACES = "model.embed_tokens.weight", "model.embed_positions.weight"
#: Of inputs of single layers, all stages have a part; of streams, the first one makes them and the last one joins them.
_OF_ALL = ("model.embed_tokens_per_layer.", "model.per_layer_model_projection.", "model.per_layer_projection_norm.")
_OF_FIRST = "model.stream_projections."


class Stage(NamedTuple):
    """One stage in a pipeline of `size`, counted from 0, and its connections to its neighbours."""

    number: int
    size: int
    link: StageLink

    @property
    def is_first(self) -> bool:
        """Return whether the stage looks up the tokens' embeddings."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Return whether the stage computes logits."""
        return self.number == self.size - 1

    def layers(self, config: ModelConfig) -> Range:
        """Return the stage's layers. config: the whole model's. Errors: ConfigError if there are too few."""
        return layers_of_stages(config, self.size)[self.number]

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of a model with the stage's layers, counted from 0."""
        part = config_of_layers(config, self.layers(config))
        return msgspec.structs.replace(part, num_labels=config.num_labels if self.is_last else 0)

    def reads(self, config: ModelConfig) -> Callable[[str], bool]:
        """Return a function that says whether the stage reads the weight of a name. config: the whole model's."""
        own = self.layers(config)
        reads_embeddings = self.is_first or (self.is_last and config.tie_word_embeddings)

        def reads(name: str) -> bool:
            if found := _LAYER.match(name):
                return own.first <= int(found[1]) < own.last
            if name in (_EMBEDDINGS, _PLACES):
                return reads_embeddings
            if name.startswith(_OF_FIRST):
                return self.is_first
            return self.is_last or name.startswith(_OF_ALL)

        return reads

    def renamed(self, config: ModelConfig, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Yield the weights that the stage reads, under the names that its own config() gives their layers."""
        first = self.layers(config).first
        for name, weight in weights:
            yield _LAYER.sub(lambda found: f"model.layers.{int(found[1]) - first}.", name), weight


def config_of_layers(config: ModelConfig, own: Range) -> ModelConfig:
    """Return the config of a model that has these layers of another one only, counted from 0."""

    def renumbered(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(layer - own.first for layer in layers if own.first <= layer < own.last)

    experts, recurrent, per_layer = config.experts, config.recurrent, config.per_layer
    count = config.num_hidden_layers
    if per_layer is not None:
        per_layer = msgspec.structs.replace(per_layer, first_layer=own.first, row_layers=count)
    if experts is not None:
        experts = msgspec.structs.replace(experts, dense_layers=renumbered(experts.dense_layers))
    if recurrent is not None:
        layers = renumbered(recurrent.layers)
        recurrent = msgspec.structs.replace(recurrent, layers=layers) if layers else None
    return msgspec.structs.replace(
        config,
        num_hidden_layers=own.length,
        sliding_layers=renumbered(config.sliding_layers),
        unrotated_layers=renumbered(config.unrotated_layers),
        num_shared_layers=min(own.length, max(0, config.num_shared_layers - (count - own.last))),
        per_layer=per_layer,
        sparse_gates=config.sparse_gates[own.first : own.last],
        experts=experts,
        recurrent=recurrent,
        file_layers=config.file_layers[own.first : own.last],
        xielu=config.xielu[own.first : own.last],
    )


def layers_of_stages(config: ModelConfig, num_stages: int) -> list[Range]:
    """Return the layers of each stage, with about the same number of weights. The last stage also has the head.

    Each stage has a layer with attention, because a KV cache has at least one. All layers to which images add are in
    the first stage, and those that share K and V with earlier ones are in the last one, with these. Errors: ConfigError
    if the model has fewer parts than stages.
    """
    count, (least_cut, most_cut) = config.num_hidden_layers, _cuts(config)
    attending = [layer for layer in range(count) if layer not in config.recurrent_layers]
    # one for each stage that there can be
    attending = sorted({min(max(layer, least_cut - 1), most_cut) for layer in attending})
    if num_stages > len(attending):
        raise ConfigError(_too_many(config, num_stages, len(attending)))
    sizes = [_layer_weights(config, layer) for layer in range(count)]
    ends = np.concatenate([[0], np.cumsum(sizes)])
    total = int(ends[-1]) + config.vocab_size * config.hidden_size
    # of each stage but the last, which may have more than its share because it cannot begin later
    share = min(total / num_stages, ends[attending[-1]] / max(1, num_stages - 1))
    bounds = [0]
    for stage in range(1, num_stages):
        least = next(layer for layer in attending if layer >= bounds[-1]) + 1
        most = attending[stage - num_stages]
        places = [layer for layer in range(least, most + 1) if not config.is_second_mixer(layer)]
        bounds.append(places[int(np.abs(ends[places] - share * stage).argmin())])
    return [Range(first, last) for first, last in zip(bounds, [*bounds[1:], count], strict=True)]


def _cuts(config: ModelConfig) -> tuple[int, int]:
    """Return the first and the last layer before which the model can be cut."""
    count, vision = config.num_hidden_layers, config.vision
    deep = len(vision.deep_layers) if isinstance(vision, GridParts) else 0
    shared = range(count - config.num_shared_layers, count)
    return max(1, deep), min(map(config.source_of, shared), default=count - 1)


def _too_many(config: ModelConfig, num_stages: int, most: int) -> str:
    """Return why the model has fewer parts than stages. most: how many it has."""
    (least_cut, most_cut), option = _cuts(config), f"pipeline_parallel_size={num_stages}"
    if not config.num_shared_layers and least_cut == 1:
        kind = "layers" + (" with attention" if config.recurrent_layers else "")
        return f"{option} is more than the model's {most} {kind}: use at most {most}"
    reasons = [f"layers from {most_cut} on share K and V"] if config.num_shared_layers else []
    reasons += [f"images add to its first {least_cut} layers"] if least_cut > 1 else []
    why = " and ".join(reasons)
    if most == 1:
        return f"{option}: the model cannot be cut into stages, as {why}: leave pipeline_parallel_size out"
    return f"{option}: the model can be cut before layers {least_cut} to {most_cut} only, as {why}: use at most {most}"


def _layer_weights(config: ModelConfig, layer: int) -> int:
    """Return the number of weights of a layer's matrices."""
    alone = config_of_layers(config, Range(layer, layer + 1))
    return alone.num_matrix_weights - config.vocab_size * config.hidden_size
