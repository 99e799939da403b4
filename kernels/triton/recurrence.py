"""Layers with a recurrent state in Triton: a convolution, and heads whose matrices are updated token by token.

The definition is kernels/recurrence.py. A program computes all tokens of one request that a step has, one after the
other, for a part of one head. So a number's bits depend neither on the other requests nor on the steps in which the
tokens were computed: at the end of a step the state goes to memory as it is, in float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.recurrence import RecurrenceParts, RecurrenceSizes, StateRows
from kernels.rounding import ceil_div, round_up
from kernels.torch.tensors import to_tensor
from kernels.triton.arithmetic.elementary import exponential, softplus
from kernels.triton.arithmetic.sums import sum_of, sums_of_columns
from kernels.triton.device import power_of_2

#: Channels of a program of the convolution, and columns of a head's matrix of a program.
CHANNELS, COLUMNS = 256, 32
_LINE, _STRIP = 16, 32  # as in kernels/recurrence.py, which has the sizes of states


class DeviceStates(NamedTuple):
    """Where the states of a step's R requests of T tokens are; all on the device."""

    states: torch.Tensor  # [slots, numbers in a request's states] float32
    rows: torch.Tensor  # [R] int32 slots; -1 = padding, which computes nothing
    firsts: torch.Tensor  # [R + 1] int32 index of each request's first token; then T
    owners: torch.Tensor  # [T] int32 the request of each token
    #: [T] int32 slots to which the state after the token is copied; -1 = none. None: no state is copied.
    saves: torch.Tensor | None = None


def device_states(requests: StateRows, device: torch.device) -> DeviceStates:
    """Return the states of host columns, with `states` on the device already."""
    counts = torch.from_numpy(requests.firsts).diff()
    owners = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts)
    rows, firsts = (torch.from_numpy(column).int().to(device) for column in (requests.rows, requests.firsts))
    saves = None if requests.saves is None else torch.from_numpy(requests.saves).int().to(device)
    assert isinstance(requests.states, torch.Tensor), type(requests.states)
    return DeviceStates(requests.states, rows, firsts, owners.to(device), saves)


def decoding_states(states: torch.Tensor, slots: torch.Tensor, saves: torch.Tensor | None) -> DeviceStates:
    """Return the states of a step of T tokens, of which those of one request are adjacent, without asking the device.

    slots [T] int32: of each token's request; -1 = padding. saves: see DeviceStates; None: each request has one token.
    """
    count = len(slots)
    indices = torch.arange(count + 1, dtype=torch.int32, device=slots.device)
    if saves is None:
        return DeviceStates(states, slots, indices, indices[:-1])
    begins = torch.ones(count, dtype=torch.bool, device=slots.device)
    begins[1:] = slots[1:] != slots[:-1]
    owners = begins.cumsum(0) - 1
    places = torch.where(begins, owners, count)  # of requests; what is written to the last one is not a request
    rows, firsts = torch.full_like(indices, -1), torch.full_like(indices, count)
    rows[places] = torch.where(begins, slots, -1)
    firsts[places] = torch.where(begins, indices[:-1], count)
    return DeviceStates(states, rows[:-1], firsts, owners.int(), saves)


def no_states(size: int, num_tokens: torch.Tensor, *, saves: bool = False) -> DeviceStates:
    """Return states of `size` numbers for a trial step that computes none.

    num_tokens [R]: of the requests. saves: the step could store states after its tokens, which is another kernel.
    """
    counts, device = num_tokens.int(), num_tokens.device
    firsts = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
    rows = torch.full_like(counts, -1)
    owners = torch.arange(len(counts), dtype=torch.int32, device=device).repeat_interleave(counts)
    nowhere = torch.full_like(owners, -1) if saves else None
    return DeviceStates(torch.empty(1, size, device=device), rows, firsts, owners, nowhere)


# fmt: off
@triton.jit
def _seen(x, states, slot, index, first, is_first, channel, inside, width, state_size, offset,
          SHORT: tl.constexpr, CHANNELS: tl.constexpr, BEFORE: tl.constexpr):
    """Return the convolution's input at token `index`, which may be before the request's first one in this step."""
    places = tl.zeros_like(channel) + index
    here = inside & (places >= first)
    at = x + tl.maximum(index, first).to(tl.int64) * width + channel
    number = tl.load(at, mask=here, other=0.0).to(tl.float32)
    if SHORT:
        number *= tl.load(at + 2 * CHANNELS, mask=here, other=0.0).to(tl.float32)
    earlier = states + slot * state_size + offset + (BEFORE + index - first) * CHANNELS + channel
    before = inside & (places < first) & (places * 0 + is_first == 0)
    return tl.where(here, number, tl.load(earlier, mask=before, other=0.0))


@triton.jit
def convolve_kernel(
    x, positions, rows, firsts, owners, states, kernel, bias, out, width, state_size, offset, start,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, SHORT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute one token's convolution for BLOCK channels: of b * x, times c; or of others, through silu.

    A padding token's is 0.
    """
    token = tl.program_id(0)
    request = tl.load(owners + token)
    slot = tl.load(rows + request).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    if slot < 0:
        nothing = tl.zeros((BLOCK,), tl.float32).to(out.dtype.element_ty)
        tl.store(out + token.to(tl.int64) * CHANNELS + channel, nothing, mask=inside)
        return
    first = tl.load(firsts + request)
    is_first = (tl.load(positions + first) == 0).to(tl.int32)
    sums = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + channel, mask=inside, other=0.0)
    for tap in tl.static_range(TAPS):
        number = _seen(
            x + start, states, slot, token - TAPS + 1 + tap, first, is_first, channel, inside, width, state_size,
            offset, SHORT, CHANNELS, TAPS - 1,
        )
        sums += tl.load(kernel + tap * CHANNELS + channel, mask=inside, other=0.0) * number
    if SHORT:
        sums *= tl.load(x + token.to(tl.int64) * width + CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        sums = tl.div_rn(sums, 1.0 + exponential(-sums))
    tl.store(out + token.to(tl.int64) * CHANNELS + channel, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def keep_inputs_kernel(
    x, positions, rows, firsts, owners, states, saves, width, state_size, offset, start,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, SHORT: tl.constexpr, SAVES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store the convolution's last inputs, BLOCK channels of them. SAVES: after each token with a slot for it."""
    if SAVES:
        last = tl.program_id(0)
        request = tl.load(owners + last)
        target = tl.load(saves + last).to(tl.int64)
    else:
        request = tl.program_id(0)
        last = tl.load(firsts + request + 1) - 1
        target = tl.load(rows + request).to(tl.int64)
    slot = tl.load(rows + request).to(tl.int64)
    if (slot < 0) | (target < 0):
        return
    first = tl.load(firsts + request)
    is_first = (tl.load(positions + first) == 0).to(tl.int32)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    at = states + target * state_size + offset + channel
    # An input is read before its place is written: a place is read only for later ones.
    for place in tl.static_range(TAPS - 1):
        number = _seen(
            x + start, states, slot, last - TAPS + 2 + place, first, is_first, channel, inside, width, state_size,
            offset, SHORT, CHANNELS, TAPS - 1,
        )
        tl.store(at + place * CHANNELS, number, mask=inside)


@triton.jit
def recur_kernel(
    mixed, x, positions, rows, firsts, states, saves, rates, step_biases, skips, out, width, state_size, offset,
    betas_at, steps_at, least_step, most_step, most_beta, scale,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, TURNS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, STRIDE: tl.constexpr, DELTA: tl.constexpr, SAVES: tl.constexpr, SKIPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Update BLOCK_V columns of one head's matrix [KEYS, VALUES] token by token, and write the results.

    Padding tokens have results of 0: they go through the rest of the model, and must be numbers.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows + request).to(tl.int64)
    first, end = tl.load(firsts + request), tl.load(firsts + request + 1)
    k, v = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    if slot < 0:
        for token in range(first, end):
            tl.store(out + (token * HEADS + head) * VALUES + v, tl.zeros((BLOCK_V,), tl.float32), mask=v < VALUES)
        return
    group = head % GROUPS if TURNS else head // (HEADS // GROUPS)
    inside = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    place = offset + head * (KEYS * STRIDE) + k[:, None] * STRIDE + v[None, :]
    began = k * 0 + tl.load(positions + first) > 0  # not the first step of a request
    matrix = tl.load(states + slot * state_size + place, mask=inside & began[:, None], other=0.0)
    rate, step_bias = tl.load(rates + head), tl.load(step_biases + head)
    skip = tl.load(skips + head) if SKIPS else 0.0
    first_at: tl.constexpr = 0 if DELTA else HEADS * VALUES + GROUPS * KEYS
    keys_at: tl.constexpr = GROUPS * KEYS if DELTA else HEADS * VALUES
    values_at: tl.constexpr = 2 * GROUPS * KEYS if DELTA else 0
    for token in range(first, end):
        row = mixed + token * CHANNELS
        queries = tl.load(row + first_at + group * KEYS + k, mask=k < KEYS, other=0.0)
        keys = tl.load(row + keys_at + group * KEYS + k, mask=k < KEYS, other=0.0)
        values = tl.load(row + values_at + head * VALUES + v, mask=v < VALUES, other=0.0)
        given = tl.load(x + token * width + steps_at + head).to(tl.float32) + step_bias
        step = softplus(given)
        if DELTA:
            queries = tl.div_rn(queries, tl.sqrt_rn(sum_of(queries * queries) + 1e-6)) * scale
            keys = tl.div_rn(keys, tl.sqrt_rn(sum_of(keys * keys) + 1e-6))
            beta = tl.load(x + token * width + betas_at + head).to(tl.float32)
            factor = tl.div_rn(most_beta, 1.0 + exponential(-beta))
        else:
            step = tl.minimum(tl.maximum(step, least_step), most_step)
            factor = step
        matrix *= exponential(-rate * step)
        added = values
        if DELTA:
            added = values - sums_of_columns(keys[:, None] * matrix)
        matrix += keys[:, None] * (added * factor)[None, :]
        result = sums_of_columns(queries[:, None] * matrix)
        if SKIPS:
            result += skip * values
        tl.store(out + (token * HEADS + head) * VALUES + v, result, mask=v < VALUES)
        if SAVES:
            target = tl.load(saves + token).to(tl.int64)
            if target >= 0:
                tl.store(states + target * state_size + place, matrix, mask=inside)
    tl.store(states + slot * state_size + place, matrix, mask=inside)


@triton.jit
def close_kernel(
    results, x, norm, out, width, gates_at, eps,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BEFORE: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one part of a token's results, and multiply by silu of its gates.

    BEFORE: the gates come first. NORMED: there is a norm, as always if they come last. GATED: there are gates, which x
    has from gates_at on.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    number = tl.load(results + (token * PARTS + part) * WIDTH + column, mask=inside, other=0.0)
    if GATED:
        gate = tl.load(x + token * width + gates_at + part * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        opened = tl.div_rn(gate, 1.0 + exponential(-gate))
        if BEFORE:
            number *= opened
    if NORMED:
        number = tl.div_rn(number, tl.sqrt_rn(tl.div_rn(sum_of(number * number), WIDTH * 1.0) + eps))
        if BEFORE:
            number *= tl.load(norm + part * WIDTH + column, mask=inside, other=0.0)
        else:
            number *= tl.load(norm + column, mask=inside, other=0.0) * opened
    tl.store(out + (token * PARTS + part) * WIDTH + column, number.to(out.dtype.element_ty), mask=inside)
# fmt: on


class CommonNorm(NamedTuple):
    """The norm of a state space whose heads several ranks have. Each rank normalises the results of all of them.

    gather: returns the columns [T, width of all] of all ranks from this rank's. sizes: of all ranks.
    """

    gather: Callable[[torch.Tensor], torch.Tensor]
    sizes: RecurrenceSizes


class TritonRecurrence:
    """What replaces attention in a layer: computes its results, and updates the states of the requests."""

    #: Of a rank: its results are of all ranks then.
    common_norm: CommonNorm | None = None

    def __init__(self, parts: RecurrenceParts, offset: int, device: torch.device) -> None:
        """offset: of the layer's state in a request's states."""
        self._sizes, self._parts, self._offset = parts.sizes, parts, offset
        arrays = parts.kernel, parts.bias, parts.rates, parts.step_biases, parts.skips, parts.norm
        sent = [None if one is None else to_tensor(one).float().contiguous().to(device, copy=True) for one in arrays]
        self._kernel, self._bias, self._rates, self._step_biases, self._skips, self._norm = sent

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, requests: DeviceStates) -> torch.Tensor:
        """Return the results [T, out_width] for x [T, width], of x's dtype.

        A request whose first token has position 0 starts with a state of zeros.
        """
        assert x.is_contiguous(), x.stride()
        is_short = self._sizes.kind == "short convolution"
        mixed = torch.empty(len(x), self._sizes.channels, dtype=x.dtype if is_short else torch.float32, device=x.device)
        self._convolve(x, positions, requests, mixed)
        if is_short:
            return mixed
        results = torch.empty(len(x), self._sizes.out_width, dtype=torch.float32, device=x.device)
        self._recur(mixed, x, positions, requests, results)
        if (common := self.common_norm) is None:
            return self._close(results, x)
        gated = torch.empty_like(results)
        self._close_parts(results, x, gated, sizes=self._sizes, is_normed=False)
        every = common.gather(gated)
        out = torch.empty(every.shape, dtype=x.dtype, device=x.device)
        self._close_parts(every, x, out, sizes=common.sizes, is_gated=False)
        return out

    def _convolve(self, x: torch.Tensor, positions: torch.Tensor, requests: DeviceStates, mixed: torch.Tensor) -> None:
        sizes, (states, rows, firsts, owners, saves) = self._sizes, requests
        options = {"TAPS": sizes.taps, "CHANNELS": sizes.channels, "SHORT": sizes.kind == "short convolution"}
        options |= {"width": x.shape[1], "state_size": states.shape[1], "offset": self._offset, "BLOCK": CHANNELS}
        options["start"] = sizes.out_width if sizes.kind == "state space" else 0
        blocks = ceil_div(sizes.channels, CHANNELS)
        bias = self._kernel if self._bias is None else self._bias
        convolve_kernel[len(x), blocks](
            x,
            positions,
            rows,
            firsts,
            owners,
            states,
            self._kernel,
            bias,
            mixed,
            HAS_BIAS=self._bias is not None,
            **options,
        )
        for is_saving in (False,) if saves is None else (True, False):
            keep_inputs_kernel[len(x) if is_saving else len(rows), blocks](
                x,
                positions,
                rows,
                firsts,
                owners,
                states,
                rows if saves is None else saves,
                SAVES=is_saving,
                **options,
            )

    def _recur(
        self,
        mixed: torch.Tensor,
        x: torch.Tensor,
        positions: torch.Tensor,
        requests: DeviceStates,
        results: torch.Tensor,
    ) -> None:
        sizes, (states, rows, firsts, _, saves) = self._sizes, requests
        width, is_delta = x.shape[1], sizes.kind == "gated delta"
        skips = self._rates if self._skips is None else self._skips
        recur_kernel[len(rows), sizes.num_heads, ceil_div(sizes.value_dim, COLUMNS)](
            mixed,
            x,
            positions,
            rows,
            firsts,
            states,
            rows if saves is None else saves,
            self._rates,
            self._step_biases,
            skips,
            results,
            width,
            states.shape[1],
            self._offset + round_up((sizes.taps - 1) * sizes.channels, _LINE),
            width - 2 * sizes.num_heads,
            width - sizes.num_heads,
            self._parts.steps[0],
            min(self._parts.steps[1], 3e38),
            self._parts.most_beta,
            sizes.key_dim**-0.5,
            CHANNELS=sizes.channels,
            HEADS=sizes.num_heads,
            GROUPS=sizes.num_groups,
            TURNS=sizes.takes_turns,
            KEYS=sizes.key_dim,
            VALUES=sizes.value_dim,
            STRIDE=round_up(sizes.value_dim, _STRIP),
            DELTA=is_delta,
            SAVES=saves is not None,
            SKIPS=self._skips is not None,
            BLOCK_K=power_of_2(sizes.key_dim),
            BLOCK_V=COLUMNS,
        )

    def _close(self, results: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self._sizes.out_width, dtype=x.dtype, device=x.device)
        self._close_parts(results, x, out, sizes=self._sizes, is_normed=self._norm is not None)
        return out

    def _close_parts(
        self,
        results: torch.Tensor,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        sizes: RecurrenceSizes,
        is_gated: bool = True,
        is_normed: bool = True,
    ) -> None:
        """Write results [T, out_width] float32 to out, after gates of x and a norm. sizes: of the results."""
        is_before = sizes.kind == "state space"
        parts = sizes.num_groups if is_before else sizes.num_heads
        size = sizes.out_width // parts
        close_kernel[len(x), parts](
            results,
            x,
            self._rates if self._norm is None else self._norm,
            out,
            x.shape[1],
            0 if is_before else sizes.channels,
            self._parts.eps,
            WIDTH=size,
            PARTS=parts,
            BEFORE=is_before,
            GATED=is_gated,
            NORMED=is_normed,
            BLOCK=power_of_2(size),
        )
