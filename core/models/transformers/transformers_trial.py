"""A trial run of a transformers model: it records the arguments of attention and detects other links between tokens.

Attention computes nothing in a trial. If a token then influences another one, it does so without attention.
"""

from typing import Any, NamedTuple

import torch

from core.models.transformers.transformers_attention import HeadShape, LayerUse, MaskFunction, Trial, current_trial
from core.models.transformers.transformers_loading import described

_NUM_TOKENS = 4
_POISONED = 1  # index of the token whose embedding is made NaN


class Layers(NamedTuple):
    """The arguments of attention for all layers together."""

    shape: HeadShape
    windows: tuple[int | None, ...]  # the distinct windows of the layers


class TrialError(Exception):
    """The reason why this engine would run a model wrongly."""


@torch.inference_mode()
def try_out(model: Any, num_layers: int, max_model_len: int) -> Layers:
    """Run a few tokens, up to the last possible position, and return the layers' arguments of attention.

    Errors: TrialError, UnsupportedModelError, and any error of the model's code.
    """
    try:
        layers, is_nan = _run(model, max_model_len, is_poisoned=True)
    except IndexError as error:
        raise TrialError(
            f"its code does not run up to position {max_model_len - 1} ({described(error)}): set max_model_len to the "
            "number of tokens that it supports"
        ) from error
    shape = _common_shape(layers, num_layers)
    first_with = {(use.window, use.mask): layer for layer, use in sorted(layers.items(), reverse=True)}
    for (window, mask), layer in first_with.items():
        _check_mask(layer, mask, window, max_model_len)
    if is_nan != [token == _POISONED for token in range(_NUM_TOKENS)]:
        raise TrialError(_explain(is_nan, _run(model, max_model_len, is_poisoned=False)[1]))
    return Layers(shape, tuple(dict.fromkeys(layers[layer].window for layer in range(num_layers))))


def _run(model: Any, max_model_len: int, *, is_poisoned: bool) -> tuple[dict[int, LayerUse], list[bool]]:
    """Run the model; return each layer's arguments of attention, and for each token whether its logits are NaN.

    is_poisoned: make the embedding of the token _POISONED NaN. Its logits, and no others, must then be NaN.
    """

    def poison(_: object, __: object, embedded: torch.Tensor) -> torch.Tensor:
        embedded = embedded.clone()
        embedded[:, _POISONED] = torch.nan
        return embedded

    trial = Trial(_NUM_TOKENS)
    token = current_trial.set(trial)
    hook = model.get_input_embeddings().register_forward_hook(poison) if is_poisoned else None
    first = max(0, max_model_len - _NUM_TOKENS)
    positions = torch.arange(first, first + _NUM_TOKENS)
    try:
        output = model(torch.zeros(1, _NUM_TOKENS, dtype=torch.int64), position_ids=positions[None], use_cache=False)
    finally:
        current_trial.reset(token)
        if hook is not None:
            hook.remove()
    return trial.layers, output.logits[0].isnan().any(-1).tolist()


def _explain(is_nan: list[bool], is_nan_without: list[bool]) -> str:
    """Return what is wrong. is_nan, is_nan_without: whether a token's logits are NaN, with and without the poison."""
    if any(is_nan_without):
        return "its logits are NaN"
    if not is_nan[_POISONED]:
        return "a NaN in a token's embedding does not reach its logits, so the check cannot tell what else it reaches"
    return (
        "a token reaches others without attention (for example by a convolution or a state space), which a KV "
        "cache of blocks cannot store"
    )


def _common_shape(layers: dict[int, LayerUse], num_layers: int) -> HeadShape:
    """Return the shape of the heads of all layers. Errors: TrialError if a KV cache of blocks cannot store them."""
    if sorted(layers) != list(range(num_layers)):
        raise TrialError(
            f"{len(layers)} of {num_layers} layers use transformers' attention interface; the others compute "
            "attention themselves, or are of a kind (state space, linear attention) that does not fit in a KV "
            "cache of blocks"
        )
    shapes = {use.shape for use in layers.values()}
    shape = layers[0].shape
    if len(shapes) > 1 or shape.value_dim > shape.head_dim:
        raise TrialError(f"its layers' heads differ in number or size: {shapes}")
    if shape.num_heads % shape.num_kv_heads:
        raise TrialError(f"{shape.num_heads} query heads cannot share {shape.num_kv_heads} KV heads evenly")
    return shape


def _check_mask(layer: int, mask: MaskFunction | None, window: int | None, max_model_len: int) -> None:
    """Check that the model's mask for a layer equals that of attention with the layer's window.

    A few rows are compared, up to max_model_len tokens. Errors: TrialError.
    """
    near = () if window is None else (window - 1, window, window + 1)
    key, zero = torch.arange(max_model_len), torch.zeros((), dtype=torch.int64)
    for row in sorted({0, 1, *near, max_model_len // 2, max_model_len - 1}):
        if row >= max_model_len:
            break
        visible = key <= row
        if window is not None:
            visible &= key > row - window
        shown = torch.ones_like(visible) if mask is None else mask(zero, zero, torch.tensor(row), key)
        if not torch.equal(visible, shown.expand_as(visible)):
            raise TrialError(
                f"the mask of layer {layer} shows {int(shown.expand_as(visible).sum())} tokens to the one at position "
                f"{row}, but the attention that the layer requests (sliding_window={window}) shows {int(visible.sum())}"
            )
