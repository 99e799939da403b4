"""Layers with a recurrent state: their constants, the sizes of their state, and their definition in NumPy.

kernels/cpu/c/layers/recurrence.h has the formulas and their sources. `recur` computes them token by token like the C
kernel, except for the order of sums.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kernels.arrays import Floats
from kernels.rounding import round_up

#: The enum in kernels/cpu/c/layers/recurrence.h, in its order.
RECURRENCES = ("short convolution", "gated delta", "state space")
RecurrenceKind = Literal["short convolution", "gated delta", "state space"]
#: The most taps of a convolution; MAX_TAPS in kernels/cpu/c/layers/recurrence.h.
MAX_TAPS = 8
#: Rows of the C kernel's buffer at most; MIXED_ROWS there.
MIXED_ROWS = 64
_STRIP = 32  # the enum of kernels/cpu/c/layers/recurrence.h
_LINE = 16  # floats of a cache line


class RecurrenceSizes(NamedTuple):
    """The sizes of one layer. A short convolution only has channels and taps; key_dim is even."""

    kind: RecurrenceKind
    taps: int  # tokens that the convolution sees, including the current one
    channels: int  # number of convolved channels
    num_heads: int = 0  # of value heads
    num_groups: int = 1  # of heads with the same keys and queries
    key_dim: int = 0
    value_dim: int = 0
    takes_turns: bool = False  # head h is in group h % num_groups; otherwise consecutive heads are in one group

    @property
    def out_width(self) -> int:
        """Return the width of a row of the result."""
        return self.channels if self.kind == "short convolution" else self.num_heads * self.value_dim

    @property
    def parts(self) -> tuple[int, ...]:
        """Return the widths of the parts of an input row, in order."""
        match self.kind:
            case "short convolution":
                return (self.channels,) * 3  # b, c, x
            case "gated delta":
                return self.channels, self.out_width, self.num_heads, self.num_heads  # q k v, z, b, a
            case "state space":
                return self.out_width, self.channels, self.num_heads  # z, v k q, dt

    @property
    def state_size(self) -> int:
        """Return the length of a request's float32 state: the convolution's last inputs, then the heads' matrices."""
        head = self.key_dim * round_up(self.value_dim, _STRIP)
        return round_up((self.taps - 1) * self.channels, _LINE) + self.num_heads * head

    @property
    def mixed_width(self) -> int:
        """Return the float32 numbers that one token needs between the parts of the C kernel."""
        return round_up(self.channels + 2 * self.num_heads, _LINE)


@dataclass(frozen=True)
class RecurrenceParts:
    """The sizes and constants of one layer; the arrays are float32."""

    sizes: RecurrenceSizes
    kernel: Floats  # [taps, channels]; the oldest token's first
    bias: Floats | None = None  # [channels]
    rates: Floats | None = None  # [heads] decay rates
    step_biases: Floats | None = None  # [heads]
    skips: Floats | None = None  # [heads]: fraction of the values added to the results
    norm: Floats | None = None  # weight [value_dim], or of a state space [heads * value_dim]; None: it has no norm
    eps: float = 0.0  # of the norm
    steps: tuple[float, float] = (0.0, float("inf"))  # smallest and largest step of a state space
    most_beta: float = 1.0  # of a gated delta net: the largest beta


class StateRows(NamedTuple):
    """Where the states of a step's R requests are."""

    states: Floats  # [rows, numbers in a request's state]
    rows: "np.ndarray[tuple[int], np.dtype[np.int64]]"  # [R] row of each request in `states`
    firsts: (
        # [R + 1] index of each request's first token; then the number of tokens
        "np.ndarray[tuple[int], np.dtype[np.int64]]"
    )
    #: [T] row of `states` to which the state after the token is copied, -1 = none; None: no state is copied
    saves: "np.ndarray[tuple[int], np.dtype[np.int64]] | None" = None


def recur(parts: RecurrenceParts, tokens: Floats, state: Floats) -> Floats:
    """Return the results [T, out_width] for one request's next tokens [T, width], and update its state in place.

    state [state_size] float32: zeros before the request's first token. It has the heads' matrices without the C
    kernel's padding.
    """
    sizes = parts.sizes
    columns = np.split(tokens, np.cumsum(sizes.parts)[:-1], 1)
    if sizes.kind == "short convolution":
        b, c, x = columns
        return c * _convolve(parts, b * x, state)
    is_delta = sizes.kind == "gated delta"
    gates = columns[1] if is_delta else columns[0]
    mixed = _silu(_convolve(parts, columns[0] if is_delta else columns[1], state))
    decays, others = _factors(parts, columns)
    shape, keys = (len(tokens), -1, sizes.key_dim), sizes.num_groups * sizes.key_dim
    order = (keys, 2 * keys) if is_delta else (sizes.out_width, sizes.out_width + keys)
    first, second, third = np.split(mixed, order, 1)
    queries, key, values = (first, second, third) if is_delta else (third, second, first)
    heads = np.arange(sizes.num_heads)
    groups = heads % sizes.num_groups if sizes.takes_turns else heads // (sizes.num_heads // sizes.num_groups)
    queries, key = (one.reshape(shape)[:, groups] for one in (queries, key))
    values = values.reshape(len(tokens), sizes.num_heads, sizes.value_dim)
    if is_delta:
        queries, key = _unit(queries) * np.float32(sizes.key_dim**-0.5), _unit(key)
    begin = round_up((sizes.taps - 1) * sizes.channels, _LINE)
    end = begin + sizes.num_heads * sizes.key_dim * sizes.value_dim
    matrices = state[begin:end].reshape(sizes.num_heads, sizes.key_dim, sizes.value_dim)
    results = np.empty_like(values)
    for token in range(len(tokens)):
        matrices *= decays[token, :, None, None]
        added = values[token]
        if is_delta:
            added = added - np.einsum("hk,hkv->hv", key[token], matrices)
        matrices += key[token, :, :, None] * (added * others[token, :, None])[:, None]
        results[token] = np.einsum("hk,hkv->hv", queries[token], matrices)
    if parts.skips is not None:
        results += parts.skips[:, None] * values
    return _gated(parts, results, gates)


def _convolve(parts: RecurrenceParts, tokens: Floats, state: Floats) -> Floats:
    """Return the convolution [T, channels] of each channel over the last tokens [T, channels]."""
    before = parts.sizes.taps - 1
    last = state[: before * parts.sizes.channels].reshape(before, -1)
    seen = np.concatenate((last, tokens))
    last[:] = seen[len(tokens) :]
    result = np.zeros_like(tokens) if parts.bias is None else np.tile(parts.bias, (len(tokens), 1))
    for tap in range(before + 1):
        result += parts.kernel[tap] * seen[tap : tap + len(tokens)]
    return result


def _factors(parts: RecurrenceParts, columns: list[Floats]) -> tuple[Floats, Floats]:
    """Return each head's decay [T, heads], and its beta or step."""
    assert parts.rates is not None, parts.sizes
    assert parts.step_biases is not None, parts.sizes
    steps = np.logaddexp(np.float32(0), columns[-1] + parts.step_biases)
    if parts.sizes.kind == "gated delta":
        return np.exp(-parts.rates * steps), np.float32(parts.most_beta) * _sigmoid(columns[-2])
    steps = steps.clip(*map(np.float32, parts.steps))
    return np.exp(-parts.rates * steps), steps


def _gated(parts: RecurrenceParts, results: Floats, gates: Floats) -> Floats:
    """Return the normalised results [T, heads * value_dim]: a state space's after its gates, others' before."""
    sizes, count = parts.sizes, len(results)
    opened = _silu(gates).reshape(results.shape)
    if sizes.kind == "state space":
        results = (results * opened).reshape(count, sizes.num_groups, -1)
        if parts.norm is None:
            return results.reshape(count, -1)
        return (_normalised(results, parts.eps).reshape(count, -1)) * parts.norm
    assert parts.norm is not None, sizes
    return (_normalised(results, parts.eps) * parts.norm * opened).reshape(count, -1)


def _normalised(x: Floats, eps: float) -> Floats:
    result: Floats = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(eps))
    return result


def _unit(x: Floats) -> Floats:
    result: Floats = x / np.sqrt(np.sum(x * x, -1, keepdims=True) + np.float32(1e-6))
    return result


def _sigmoid(x: Floats) -> Floats:
    result: Floats = np.exp(-np.logaddexp(np.float32(0), -x))
    return result


def _silu(x: Floats) -> Floats:
    return x * _sigmoid(x)
