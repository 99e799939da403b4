"""Linear layers whose every output row has the same bits whatever the number of rows beside it.

The C kernel is made that way and runs any number of rows. torch's products are free to sum over K in another order for
another number of rows, and do: one row, few rows and many rows run different kernels, and threads split rows into
pieces of any size. With those a PackedLinear runs only row counts of one fixed list (shorter inputs are padded, longer
ones cut), and a probe at construction keeps of that list only the counts whose results it has seen to be bitwise equal
on this machine.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear

from kernels.arrays import Floats
from kernels.cpu_gemm import PackedMatrix
from kernels.cpu_library import CpuLibrary
from kernels.rounding import ceil_div

#: A tensor to a tensor: what models are put together from.
Operation = Callable[[torch.Tensor], torch.Tensor]

#: Row counts that may be run. Coarser steps waste rows in the padding, finer ones lengthen the probe.
ROW_COUNTS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)

#: A kernel is taken when its row counts begin at most here (decode would be mostly padding) and end at least there
#: (prefill would be cut into slivers).
_SMALLEST_AT_MOST, _LARGEST_AT_LEAST = 8, 64

_NUM_PROBE_COLUMNS = 64


class Variant(NamedTuple):
    """How products of one shape and dtype are computed on this machine."""

    kernel: str  # "c-avx512bf16", ... | "onednn-prepacked" | "linear"
    row_counts: tuple[int, ...]  # ascending; all bitwise equal, row for row. Empty: any number
    signature: str  # hex digest of the probe's result: other summation order, other signature

    def __str__(self) -> str:
        counts = f"{self.row_counts[0]}..{self.row_counts[-1]}" if self.row_counts else "any"
        return f"{self.kernel}[{counts}]:{self.signature}"


class PackedLinear:
    """y = x @ weight.T + bias with row-invariant results; weight [out, in] float32 or bfloat16 is packed and not kept;
    bias [out] float32.

    library: of the C kernels; None = torch's products. What is rounded, and when: the C kernel rounds sum + bias once,
    to out_dtype (None = the weight's); torch rounds to the weight's dtype before and after it adds the bias.
    gate, is_kept: of the C kernel only (kernels.cpu_gemm).
    max_rows: the largest row count worth running at once, for layers that never see more (the head sees one row per
    request); it shortens the probe.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        library: CpuLibrary | None = None,
        *,
        max_rows: int = ROW_COUNTS[-1],
        out_dtype: torch.dtype | None = None,
        gate: str | None = None,
        is_kept: bool = False,
    ) -> None:
        assert gate is None or library is not None, gate
        num_columns, self.in_features = weight.shape
        self.out_features = num_columns if gate is None else num_columns // 2
        if library is not None:
            self.chosen = _c_variant(library, self.in_features, weight.dtype)
            matrix = PackedMatrix(library, weight, bias, out_dtype=out_dtype, gate=gate, is_kept=is_kept)
            self.matrix: PackedMatrix | None = matrix
            self._operation: Operation = matrix
        else:
            self.matrix = None  # of the C kernel
            row_counts = tuple(count for count in ROW_COUNTS if count <= max_rows)
            num_threads = torch.get_num_threads()
            self.chosen = _choose(self.out_features, self.in_features, weight.dtype, row_counts, num_threads)
            product = KERNELS[self.chosen.kernel](weight)
            rounded = product if bias is None else lambda x: product(x).add_(bias)
            self._operation = rounded if out_dtype is None else lambda x: rounded(x).to(out_dtype)
        self._row_counts = frozenset(self.chosen.row_counts)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows that are run without padding; empty: any."""
        return self.chosen.row_counts

    @property
    def variant(self) -> str:
        """Names kernel, row counts and summation order; equal variants give equal bits. Part of the fingerprint."""
        return str(self.chosen)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] contiguous -> [T, out] of out_dtype."""
        num_rows = x.shape[0]
        if not self._row_counts or num_rows in self._row_counts:
            return self._operation(x)
        largest = self.chosen.row_counts[-1]
        parts = []
        for first in range(0, num_rows, largest):
            part = x[first : first + largest]
            count = part.shape[0]
            if count not in self._row_counts:
                padded = x.new_zeros(padded_rows(count, self.chosen.row_counts), self.in_features)
                padded[:count] = part
                part = padded
            parts.append(self._operation(part)[:count])
        return torch.cat(parts) if parts else self._operation(x.new_zeros(largest, self.in_features))[:0]


def padded_rows(num_rows: int, row_counts: tuple[int, ...]) -> int:
    """The least number >= num_rows that runs without padding: whole largest counts, and one that holds the rest."""
    if not row_counts:
        return num_rows
    whole, rest = divmod(num_rows, row_counts[-1])
    return whole * row_counts[-1] + (next(count for count in row_counts if count >= rest) if rest else 0)


def _prepacked(weight: torch.Tensor) -> Operation:
    """oneDNN's own blocked weight layout: two to three times as fast as F.linear for few rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, None, "none", [], "")


def _plain(weight: torch.Tensor) -> Operation:
    weight = weight.clone(memory_format=torch.contiguous_format)  # aligned as the probe's was, and not a mapped file
    return lambda x: linear(x, weight)


#: By preference. Each packs a weight and returns the product with it.
KERNELS: dict[str, Callable[[torch.Tensor], Operation]] = {"onednn-prepacked": _prepacked, "linear": _plain}


@lru_cache(maxsize=256)
def _c_variant(library: CpuLibrary, in_features: int, dtype: torch.dtype) -> Variant:
    """The order of summation depends on none but these."""
    row, weight = probe_inputs(_NUM_PROBE_COLUMNS, in_features, dtype)
    return Variant(f"c-{library.variant}", (), _digest(PackedMatrix(library, weight)(row)))


@lru_cache(maxsize=256)
def _choose(
    out_features: int, in_features: int, dtype: torch.dtype, row_counts: tuple[int, ...], num_threads: int
) -> Variant:
    """The variant for this shape: by preference, never by a timing. num_threads belongs to the cache key."""
    row, weight = probe_inputs(out_features, in_features, dtype)
    best: Variant | None = None
    for kernel, pack in KERNELS.items():
        try:
            operation = pack(weight)
            found = probe(kernel, operation, row, row_counts)
        except (RuntimeError, AttributeError):  # this build or CPU has no such kernel for the dtype
            continue
        if found is None:
            continue
        if found.row_counts[0] <= _SMALLEST_AT_MOST and found.row_counts[-1] >= min(_LARGEST_AT_LEAST, row_counts[-1]):
            return found
        if best is None or len(found.row_counts) > len(best.row_counts):
            best = found
    if best is not None:
        return best
    # One row at a time has no neighbours: invariant whatever the library does.
    alone = linear(row, weight)
    return Variant("linear", (1,), _digest(alone))


def probe(kernel: str, operation: Operation, row: torch.Tensor, row_counts: tuple[int, ...]) -> Variant | None:
    """Run copies of one row [1, in] in every row count; of the counts that agree bitwise, and within which all rows
    agree, keep the most numerous class (the first of equals). None if no count gives all its rows the same bits."""
    classes: dict[str, list[int]] = {}
    for count in row_counts:
        result = operation(row.expand(count, -1).contiguous())
        if bool((result == result[0]).all()):
            classes.setdefault(_digest(result[:1]), []).append(count)
    if not classes:
        return None
    signature = max(classes, key=lambda each: len(classes[each]))
    return Variant(kernel, tuple(classes[signature]), signature)


def probe_inputs(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A row [1, in] and a weight [out, in] whose exact product is zero, so that results are rounding errors only.

    Terms come in pairs that cancel, far apart in K, with magnitudes over 2**12: what remains depends on the order of
    summation in every bit. (With ordinary numbers bfloat16 output rounds such differences away and the probe is blind.)
    """
    rng = np.random.Generator(np.random.PCG64(in_features))
    half = in_features // 2
    bits = 8 if dtype == torch.bfloat16 else 23  # mantissas are exact in the dtype

    def numbers(*shape: int) -> Floats:
        mantissas = rng.integers(2 ** (bits - 1), 2**bits, shape) * rng.choice((-1, 1), shape)
        result: Floats = np.ldexp(mantissas.astype(np.float32), rng.integers(-3, 4, shape) - bits)
        return result

    row, columns = numbers(1, half), numbers(_NUM_PROBE_COLUMNS, half)
    order = rng.permutation(2 * half)
    x = np.zeros((1, in_features), np.float32)
    w = np.zeros((_NUM_PROBE_COLUMNS, in_features), np.float32)
    x[:, : 2 * half] = np.concatenate((row, row), 1)[:, order]
    w[:, : 2 * half] = np.concatenate((columns, -columns), 1)[:, order]
    repeats = ceil_div(out_features, _NUM_PROBE_COLUMNS)
    weight = torch.from_numpy(w).to(dtype).repeat(repeats, 1)[:out_features]
    return torch.from_numpy(x).to(dtype), weight


def _digest(result: torch.Tensor) -> str:
    """Of the bits of the first row, in hex."""
    return hashlib.blake2b(result[0].float().numpy().tobytes(), digest_size=4).hexdigest()
