"""Prompts given as embeddings: the rows that stand for the tokens of a prompt, checked."""

from typing import Any

import numpy as np

from ipc.errors import InvalidRequestError, UnsupportedParameterError
from ipc.tables.arrays import Floats
from ipc.wire.feature_messages import FeatureLimits
from ipc.wire.placed_feature import PlacedFeature, placed_embeds


def read_prompt_embeds(value: Any, name: str, limits: FeatureLimits | None) -> list[PlacedFeature]:
    """Return the features of a prompt that is embeddings alone.

    value: [tokens, hidden], an array of NumPy's or a tensor of torch's, of floats. Errors: InvalidRequestError;
    UnsupportedParameterError where the engine takes none.
    """
    if limits is None:
        raise UnsupportedParameterError(
            f"{name}: 'prompt_embeds' are not taken by this engine: it needs a decoder of our own on the C kernels, in "
            "one process, without a draft model and without a router before it"
        )
    rows = _as_floats(value, name)
    if rows.ndim != 2 or rows.shape[1] != limits.width or not len(rows):
        raise InvalidRequestError(
            f"{name}: 'prompt_embeds' must have the shape [tokens, {limits.width}], at least one token; got "
            f"{list(rows.shape)}"
        )
    if not np.isfinite(rows).all():
        raise InvalidRequestError(f"{name}: 'prompt_embeds' must be finite numbers")
    if rows.nbytes > limits.max_bytes:
        raise InvalidRequestError(f"{name}: 'prompt_embeds' take {rows.nbytes} bytes; at most {limits.max_bytes} may")
    return placed_embeds(rows)


def _as_floats(value: Any, name: str) -> Floats:
    if hasattr(value, "detach"):  # a tensor of torch's; NumPy has no bfloat16
        value = value.detach().float().cpu().numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise InvalidRequestError(f"{name}: 'prompt_embeds' must be an array or a tensor of floats; got {kind}")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(value, np.float32)
