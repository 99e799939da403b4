"""WeightForm: how a model's matrices are stored in memory, and the form that this machine multiplies fastest."""

from enum import Enum

from core.models.config import ModelConfig
from ipc.machine.memory import usable_memory_bytes
from kernels.elements import BFLOAT16, Dtype

#: With more threads, memory delivers dequantized weights more slowly than the threads decode stored ones.
_FEW_THREADS = 2
#: Weights in a larger form than necessary may use at most one part in this many of the memory.
_MEMORY_PARTS = 4


class WeightForm(Enum):
    """How a model's matrices are stored in memory."""

    STORED = "as stored, where products can read that"
    DENSE = "dequantized"
    BOTH = "dequantized, and as stored for products of few rows"
    INT8 = "as stored or quantized to 8 bits, for products in 8 bits"
    FP8 = "floats of 8 bits, for products with activations of 8 bits, on a GPU"


def best_form(variant: str, num_threads: int, num_weights: int, *, has_few_rows: bool = True) -> WeightForm:
    """Return the fastest form for bfloat16 products of a quantized file: STORED, DENSE or BOTH, with equal results.

    variant: of the C kernels. num_weights: of all matrices. has_few_rows: whether a step may compute only a few rows.

    Decoding a vector of stored weights takes four to six instructions, a compact vector one half. If `vdpbf16ps` runs
    at full rate (the variant avx512bf16 is only chosen on such CPUs), a product of stored weights is limited by
    decoding from a few rows on. One of fewer rows waits for memory if two threads share it, and stored weights are
    fewer bytes. So BOTH is the fastest, if there is room. The vectors of AVX2 are half as wide: there products of one
    row took 1.9 times as long with one thread. The float32 variant of AVX-512 is faster with stored weights from 4
    rows on.
    """
    if variant not in ("avx512bf16", "avx2") or num_threads > _FEW_THREADS:
        return WeightForm.STORED
    has_both = variant == "avx512bf16" and num_threads == _FEW_THREADS and has_few_rows
    if has_both and _fit(num_weights, BFLOAT16.itemsize + 1):
        return WeightForm.BOTH
    return WeightForm.DENSE if _fit(num_weights, BFLOAT16.itemsize) else WeightForm.STORED


def fits(config: ModelConfig, dtype: Dtype) -> bool:
    """Return whether a model's matrices in dtype use at most a quarter of the memory."""
    return _fit(config.num_matrix_weights, dtype.itemsize)


def _fit(num_weights: int, bytes_per_weight: int) -> bool:
    return num_weights * bytes_per_weight * _MEMORY_PARTS <= usable_memory_bytes()
