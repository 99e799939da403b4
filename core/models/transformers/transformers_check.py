"""The start-up check of a transformers model: two requests on this engine, compared with the model's own attention."""

from collections.abc import Callable

import numpy as np

from core.models.interface import Model
from core.models.step import ModelInputs
from ipc.tables.arrays import Floats, Ints
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from kernels.memory.kv_cache import KVCache

#: The largest deviation from the logits of the model's own attention that counts as rounding, relative to the largest
#: logit.
_TOLERANCE = {FLOAT32: 1e-3, BFLOAT16: 0.05}

_BLOCK_SIZE = 16
_LENGTHS = 7, 5  # tokens of the two prompts
_LATE = 1, 2  # of these, the tokens that a second step computes
_MOST_TOKENS = 64  # maximum length of a prompt that is extended beyond a sliding window

Prompt = Ints

_ZERO = np.zeros(1, np.int64)


def find_difference(
    model: Model,
    dtype: Dtype,
    smallest_window: int | None,
    max_model_len: int,
    own_logits: Callable[[Prompt], Floats],
) -> str | None:
    """Return what is wrong with the model on this engine; None if its logits match those of its own attention.

    Two prompts of different lengths are computed in two steps as one batch. The second step is a decode step for one of
    them. It is beyond the sliding window if the window is small. It also has a token at the last possible position.

    own_logits: computes the logits [1, vocab] of a prompt's last token with only the model's own code.
    """
    longest, other = _LENGTHS
    if smallest_window is not None and smallest_window + 2 <= min(_MOST_TOKENS, max_model_len):
        longest = max(longest, smallest_window + 2)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocab_size, length) for length in (longest, other)]
    expected = np.concatenate([own_logits(prompt) for prompt in prompts])
    scale = float(np.abs(expected).max()) or 1.0

    def error_of(logits: Floats) -> float:
        return float(np.abs(logits - expected).max()) / scale

    together = error_of(_in_steps(model, prompts, _LATE, far=max_model_len - 1))
    if together < _TOLERANCE[dtype]:
        return None
    at_once = error_of(np.concatenate([_in_steps(model, [prompt], ()) for prompt in prompts]))
    if not at_once < _TOLERANCE[dtype]:
        return (
            f"with this engine's attention its logits are off by {at_once:.2%} of the largest (at most "
            f"{_TOLERANCE[dtype]:.1%} is rounding): its own attention does something that this engine does not support"
        )
    pairs = zip(prompts, _LATE, strict=True)
    decoded = error_of(np.concatenate([_in_steps(model, [prompt], (late,)) for prompt, late in pairs]))
    if not decoded < _TOLERANCE[dtype]:
        return (
            f"after a second step its logits are off by {decoded:.2%} of the largest: its code keeps other state "
            "between tokens than keys and values"
        )
    return (
        f"two requests in one batch change each other's logits by {together:.1%}: its code does not keep packed "
        "sequences apart by position_ids"
    )


def _in_steps(model: Model, prompts: list[Prompt], late: tuple[int, ...], far: int | None = None) -> Floats:
    """Return the logits [n, vocab] of the last token of each prompt, computed with a new cache.

    late: number of tokens of each prompt that a second step computes; empty: there is one step. far: position of an
    additional token in the last step.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    width = -(-int(lengths.max()) // _BLOCK_SIZE)
    tables = 1 + np.arange((len(prompts) + 1) * width).reshape(-1, width)  # the last row is for the far token
    cache = model.allocate_cache(int(tables[-1, -1]) + 1, _BLOCK_SIZE)
    starts = np.zeros_like(lengths)
    if late:
        first_ends = lengths - np.array(late)
        _step(model, cache, tables, prompts, starts, first_ends, None)
        starts = first_ends
    return _step(model, cache, tables, prompts, starts, lengths, far)


def _step(
    model: Model, cache: KVCache, tables: Prompt, prompts: list[Prompt], starts: Prompt, ends: Prompt, far: int | None
) -> Floats:
    """Compute the prompts' tokens from starts to ends, and the far token; return the last tokens' logits [n, vocab]."""
    positions = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    tokens = [prompt[chosen] for prompt, chosen in zip(prompts, positions, strict=True)]
    places = positions  # token index in the request's blocks
    if far is not None:
        positions, tokens, places = [*positions, np.array([far])], [*tokens, _ZERO], [*places, _ZERO]
        starts, ends = np.append(starts, 0), np.append(ends, 1)
    rows = zip(tables, places, strict=False)  # the last table is unused if there is no far token
    slots = [table[chosen // _BLOCK_SIZE] * _BLOCK_SIZE + chosen % _BLOCK_SIZE for table, chosen in rows]
    columns = (np.concatenate(column) for column in (tokens, positions, slots))
    token_column, position_column, slot_column = columns
    counts = ends - starts
    attention = model.attention_metadata(counts, ends, tables[: len(counts)], cache)
    last = np.cumsum(counts)[: len(prompts)] - 1
    return model.forward(ModelInputs(token_column, position_column, slot_column, attention, cache, last)).logits
