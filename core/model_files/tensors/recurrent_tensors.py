"""The tensors of layers with a recurrent state: their shapes, and those in files under other names."""

import math
from collections.abc import Mapping

import msgspec

from core.model_files.tensors.stored_tensor import StoredTensor
from core.models.config import ModelConfig

#: Name endings in files -> the same with the kind of tensor after the last dot, as in other tensors' names.
_ENDS = {".A_log": ".A_log.weight", ".D": ".D.weight", ".dt_bias": ".dt.bias", "ssm_a": "ssm_a.weight"}
_ENDS |= {"ssm_d": "ssm_d.weight"}
#: OLMo-Hybrid's norms of recurrent layers -> as transformers calls them; it saves others under the second name, too.
_ENDS |= {"attention_layer_norm.weight": "input_layernorm.weight"}
_ENDS |= {"feedforward_layer_norm.weight": "post_attention_layernorm.weight"}


def recurrence_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that a recurrent layer has instead of attention's, by name."""
    own = config.recurrent
    assert own is not None, config
    sizes, hidden, heads = own.sizes, config.hidden_size, own.num_heads
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in own.input_widths.items():
        shapes[f"mixer.{name}.weight"] = (size, hidden)
    if own.has_product_biases:
        shapes |= {f"mixer.{name}.bias": (size,) for name, size in own.input_widths.items()}
    shapes |= {f"mixer.{name}.weight": (size, own.taps) for name, size in own.convolution_widths.items()}
    if own.has_bias:
        shapes["mixer.convolution.bias"] = (own.channels,)
    if heads:
        shapes |= {"mixer.rates.weight": (heads,), "mixer.step.bias": (heads,)}
        if own.kind == "state space":
            shapes["mixer.skips.weight"] = (heads,)
        if own.has_norm:
            shapes["mixer.norm.weight"] = (own.value_dim if own.kind == "gated delta" else sizes.out_width,)
    shapes["mixer.out_proj.weight"] = (hidden, sizes.out_width)
    if own.has_product_biases:
        shapes["mixer.out_proj.bias"] = (hidden,)
    return shapes


def input_order(name: str, config: ModelConfig) -> tuple[int, tuple[int, ...]] | None:
    """Return (number of heads, order of the rows) for a matrix of a recurrent layer; None for other layers.

    We keep the rows of each part of the input together; the file has them head group by head group.
    """
    own = config.recurrent
    if own is None or ".mixer." not in name:
        return None
    if not name.endswith(("mixer.qkvz_proj.weight", "mixer.ba_proj.weight")):
        return 0, ()
    each = own.num_heads // own.num_groups
    widths = (own.key_dim, own.key_dim, each * own.value_dim, each * own.value_dim) if "qkvz" in name else (each, each)
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return 1, tuple(
        group * sum(widths) + start + place
        for start, width in zip(starts, widths, strict=True)
        for group in range(own.num_groups)
        for place in range(width)
    )


def like_others(found: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Return a file's tensors, with names ending in weight or bias, and without meaningless dimensions of size 1."""
    if config.recurrent is None:
        return dict(found)
    tensors = {}
    for name, stored in found.items():
        end = next((end for end in _ENDS if name.endswith(end)), None)
        renamed = name if end is None else name.removesuffix(end) + _ENDS[end]
        tensors[renamed] = msgspec.structs.replace(stored, shape=_shape(renamed, stored.shape))
    return tensors


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without the convolution's middle dimension, and with one dimension for vectors."""
    if len(shape) == 3 and shape[1] == 1 and "conv" in name:  # [channels, 1, taps]
        return shape[0], shape[2]
    if name.endswith(("ssm_a.weight", "ssm_d.weight", "ssm_norm.weight")):  # [heads, 1], [groups, numbers]
        return (math.prod(shape),)
    return shape
