"""TritonWork: the queries that a step's attention kernels compute.

The decode kernel computes requests with one query token. The tokens of other requests are split into tiles for the
prefill kernel. Both kernels look up positions and blocks on the device.
"""

from typing import NamedTuple

import numpy as np
import torch

from kernels.arrays import AnyInts, Int32s, Ints
from kernels.rounding import ceil_div
from kernels.triton.device import power_of_2

#: Tokens of context per decode program. It is fixed, so that the order of summation depends only on the request.
SPLIT = 256

#: Rows of a prefill program's products: tokens of a query tile x query heads per KV head, padded.
PREFILL_ROWS = 128


class TritonWork(NamedTuple):
    """One step's attention work. The tensors are int32 and on the device."""

    rows: torch.Tensor  # [T] row of the block tables of each token; -1 = padding
    positions: torch.Tensor  # [T]; -1 = padding
    tables: torch.Tensor  # [rows, P] block ids; entries beyond a request's context are never read
    decode_tokens: torch.Tensor  # [n] indices of tokens that are their request's only one; -1 = padding
    tile_tokens: torch.Tensor  # [m] index of each query tile's first token; -1 = padding
    tile_counts: torch.Tensor  # [m] tokens of the tile; -1 = padding
    num_splits: int  # splits of SPLIT tokens in the longest context of decode_tokens, or more
    window: int | None = None  # tokens that a row sees up to itself, including itself; None = all before it
    #: [n] for each of decode_tokens: how many tokens its program computes, itself and those that follow it in the same
    #: request; 0 = an earlier token's program computes it. None: each has its own program.
    shared: torch.Tensor | None = None
    #: [1] how many leading splits all of decode_tokens have in common: the same blocks, whole in each context. None: no
    #: split is read for several. Not together with `shared`, and not for layers with a window.
    common: torch.Tensor | None = None
    #: [T] the position of the last token that each token sees. Tokens of an image see each other, and an encoder's see
    #: all of their prompt. Those of decode_tokens are the last ones of their request. None: no token sees a later one.
    lasts: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Return the number of tokens, including padding."""
        return len(self.rows)


def tile_tokens(group_size: int) -> int:
    """Return the tokens per query tile. group_size: query heads per KV head."""
    return max(1, PREFILL_ROWS // power_of_2(group_size))


def decode_rows(group_size: int) -> int:
    """Return the rows of a decode program's products, at least 16."""
    return max(16, power_of_2(group_size))


def shared_tokens(counts: AnyInts, group_size: int) -> Int32s:
    """Return TritonWork.shared for requests with `counts` decode tokens each, packed request after request."""
    most, before = decode_rows(group_size) // group_size, np.repeat(np.cumsum(counts) - counts, counts)
    place = np.arange(len(before)) - before
    return np.where(place % most == 0, np.minimum(most, np.repeat(counts, counts) - place), 0).astype(np.int32)


def kv_tile_tokens(head_dim: int, dtype: torch.dtype) -> int:
    """Return the tokens per KV tile, a divisor of SPLIT.

    There are fewer if a token has many numbers. A tile must fit in shared memory, and a float32 product, which has no
    matrix unit, is unrolled into registers.
    """
    if dtype.itemsize == 4:
        return 32 if head_dim <= 64 else 16
    return 64 if head_dim <= 128 else 32 if head_dim <= 256 else 16


#: Compiler options of a prefill program, which needs more registers than 4 warps have.
PREFILL_OPTIONS = {"num_warps": 8, "num_stages": 2}


def prefill_parts(head_dim: int) -> int:
    """Return the programs of a query tile and KV head: more if the registers of one have no room for its sums."""
    return 1 if head_dim <= 128 else 2 if head_dim <= 256 else 8


class WorkColumns(NamedTuple):
    """The columns of a TritonWork in host memory, before they are sent: int32."""

    decode_tokens: Int32s
    tile_tokens: Int32s
    tile_counts: Int32s
    num_splits: int


def work_columns(num_tokens: AnyInts, context_lens: AnyInts, group_size: int) -> WorkColumns:
    """Compute the columns of a batch with column operations only.

    num_tokens [R] > 0: tokens of each request, packed request after request; context_lens [R]: tokens in the cache
    after the step, including these.
    """
    first = np.cumsum(num_tokens) - num_tokens
    alone = num_tokens == 1
    longest = int(context_lens[alone].max(initial=0))
    size = tile_tokens(group_size)
    counts, starts = num_tokens[~alone], first[~alone]
    num_tiles = ceil_div(counts, size)
    which = np.repeat(np.arange(len(counts)), num_tiles)
    number = np.arange(len(which)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    return WorkColumns(
        first[alone].astype(np.int32),
        (starts[which] + number * size).astype(np.int32),
        np.minimum(counts[which] - number * size, size).astype(np.int32),
        ceil_div(longest, SPLIT),
    )


def last_seen(positions: AnyInts, wholes: AnyInts) -> Int32s:
    """Return TritonWork.lasts for positions [T] of a step's tokens, of which runs see each other.

    wholes [n, 2]: index of a run's first token in the step, and its number of tokens.
    """
    lasts = positions.astype(np.int32)
    for first, count in wholes.tolist():
        lasts[first : first + count] = lasts[first + count - 1]
    return lasts


def whole_prompts(num_tokens: AnyInts) -> Ints:
    """Return the runs of last_seen() if all tokens [R] of each request see each other."""
    counts = num_tokens.astype(np.int64)
    return np.stack((np.cumsum(counts) - counts, counts), 1)


def triton_work(
    num_tokens: AnyInts,
    context_lens: AnyInts,
    block_tables: AnyInts,
    group_size: int,
    device: torch.device,
    window: int | None = None,
    wholes: AnyInts | None = None,
) -> TritonWork:
    """Make a TritonWork from columns and block tables [R, P] in host memory, like kernels.attention_metadata.

    wholes: see last_seen(); None = no token sees a later one.
    """
    columns = work_columns(num_tokens, context_lens, group_size)
    rows = np.repeat(np.arange(len(num_tokens)), num_tokens)
    last = np.cumsum(num_tokens) - 1
    positions = np.arange(len(rows)) + np.repeat(context_lens - 1 - last, num_tokens)

    def sent(column: AnyInts) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(column, np.int32)).to(device)

    return TritonWork(
        sent(rows),
        sent(positions),
        sent(block_tables),
        sent(columns.decode_tokens),
        sent(columns.tile_tokens),
        sent(columns.tile_counts),
        columns.num_splits,
        window,
        lasts=None if wholes is None else sent(last_seen(positions, wholes)),
    )
