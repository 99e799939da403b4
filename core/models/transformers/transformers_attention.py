"""This engine's attention behind transformers' attention interface, and the masks that models request with it.

In a step, attention writes keys and values to the KV cache and reads them from it. In a trial, which runs when the
model is loaded, it only records each layer's arguments.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from core.models.architectures.by_name import ARCHITECTURES
from ipc.errors import UnsupportedModelError
from kernels.torch.attention import AttentionMetadata, paged_attention
from kernels.torch.kv_cache import TorchKVCache

#: The end of every error text.
INSTEAD = (
    f"; supported are {', '.join(ARCHITECTURES)}, and transformers models whose layers all use its attention interface "
    "and keep no other state between tokens: see docs/models.md"
)

#: Arguments of attention that this engine does not support, and their values that have no effect.
_EXTRAS: dict[str, tuple[object, ...]] = {
    "softcap": (None, 0.0),
    "s_aux": (None,),
    "position_bias": (None,),
    "is_causal": (None, True),
}

#: transformers' form of a mask: (request, head, query position, KV position), which are broadcast -> visible, bool.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class HeadShape(NamedTuple):
    """The number and sizes of one layer's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


class LayerUse(NamedTuple):
    """The arguments of attention in one layer."""

    shape: HeadShape
    window: int | None  # number of tokens that a token sees, including itself; None = all before it
    mask: MaskFunction | None  # the mask that the model made for the layer, if any


class Trial:
    """A forward pass in which attention computes nothing: each token's result is its own query."""

    def __init__(self, num_tokens: int) -> None:
        self.layers: dict[int, LayerUse] = {}
        # by address, which stays in use because the tensor is kept
        self._masks: dict[int, tuple[torch.Tensor, MaskFunction]] = {}
        self._num_tokens = num_tokens

    def make_mask(self, function: MaskFunction) -> torch.Tensor:
        """Return a causal mask [1, 1, T, T]. note() recognizes it by its memory address."""
        mask = torch.ones(1, 1, self._num_tokens, self._num_tokens, dtype=torch.bool).tril()
        self._masks[mask.untyped_storage().data_ptr()] = mask, function
        return mask

    def note(self, module: Any, shape: HeadShape, window: int | None, mask: object) -> None:
        """Record the arguments of one layer's attention.

        Errors: UnsupportedModelError for a second call from one layer, and for a mask that the layer made itself.
        """
        if module.layer_idx in self.layers:
            raise _called_twice(module)
        function = None
        if mask is not None:
            address = mask.untyped_storage().data_ptr() if isinstance(mask, torch.Tensor) else 0
            if address not in self._masks:
                raise _own_mask(module)
            function = self._masks[address][1]
        self.layers[module.layer_idx] = LayerUse(shape, window, function)


class Step(NamedTuple):
    """The inputs of attention in the current step."""

    cache: TorchKVCache
    metadata: dict[int | None, AttentionMetadata]  # by sliding window
    write_rows: torch.Tensor
    stored: torch.Tensor  # indices of the tokens whose keys and values are stored
    layers: set[int]  # layers that have stored their keys and values in this step


current_step: ContextVar[Step] = ContextVar("current_step")
current_trial: ContextVar[Trial] = ContextVar("current_trial")


def make_mask(*_: object, mask_function: MaskFunction, **__: object) -> torch.Tensor | None:
    """Implement transformers' mask function.

    A step needs no mask, because attention's metadata says which tokens a token sees. A trial makes a mask that it can
    recognize.
    """
    trial = current_trial.get(None)
    return None if trial is None else trial.make_mask(mask_function)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extras: object,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention function: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D].

    Errors: UnsupportedModelError, naming the layer, for arguments that this engine's attention does not support.
    """
    for name, neutral in _EXTRAS.items():
        if extras.get(name) is not None and extras[name] not in neutral:
            raise _refusal(module, f"{name} is not supported by the generic path")
    trial = current_trial.get(None)
    if trial is not None:
        shape = HeadShape(query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        trial.note(module, shape, sliding_window, attention_mask)
        return query.transpose(1, 2)[..., : shape.value_dim], None
    step = current_step.get(None)
    if step is None:
        raise _refusal(module, "its head runs additional layers, outside a step")
    if attention_mask is not None:
        raise _own_mask(module)
    if module.layer_idx in step.layers:
        raise _called_twice(module)
    step.layers.add(module.layer_idx)
    return _paged(module.layer_idx, query, key, value, step, scaling, sliding_window), None


def _paged(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: Step,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    num_tokens, width, value_dim = key.shape[2], key.shape[1] * key.shape[3], value.shape[3]
    if value_dim < key.shape[3]:  # the cache has one size for keys and values; DeepSeek's values are shorter
        value = torch.nn.functional.pad(value, (0, key.shape[3] - value_dim))
    kv = torch.cat((key[0].transpose(0, 1).reshape(-1, width), value[0].transpose(0, 1).reshape(-1, width)), -1)
    step.cache.write(layer, step.write_rows, kv[step.stored])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q = query[0].transpose(0, 1).float().contiguous()
    out = paged_attention(q, step.cache, layer, step.metadata[window], scale)
    return out.view(1, num_tokens, query.shape[1], -1)[..., :value_dim]


def _refusal(module: object, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(module).__name__}: {reason}{INSTEAD}")


def _called_twice(module: Any) -> UnsupportedModelError:
    return _refusal(
        module,
        f"layer {module.layer_idx} calls attention more than once in a forward pass, but the KV cache has one slot "
        "for a layer's keys and values",
    )


def _own_mask(module: Any) -> UnsupportedModelError:
    return _refusal(
        module, f"layer {module.layer_idx} makes its own attention mask, which this engine's attention cannot use"
    )
