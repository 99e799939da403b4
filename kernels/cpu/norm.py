"""CpuNorm: normalisation of rows, and the addition before it, with the C kernel (kernels/cpu/c/layers/norm.h)."""

import ctypes

import numpy as np

from kernels.arrays import Floats
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.structs import NormArguments, NormWeights
from kernels.elements import Dtype, Numbers
from kernels.memory.aligned import aligned_empty


class CpuNorm:
    """Computes x / sqrt(mean(x ** 2) + eps) * weight. weight is [d] float32; results are rounded once to dtype.

    A centred norm is a layer normalisation: it subtracts each row's mean first, and may add a bias [d] float32. A norm
    that replaces also writes its result to `hidden`. A norm that precedes normalises `hidden` as it was before the
    addition. Without a weight, float32 rows are only rounded to dtype.
    `multiplier` scales what is added.
    """

    def __init__(
        self,
        library: CpuLibrary,
        weight: Floats | None,
        eps: float,
        dtype: Dtype,
        *,
        multiplier: float = 1.0,
        bias: Floats | None = None,
        is_centred: bool = False,
        replaces: bool = False,
        precedes: bool = False,
    ) -> None:
        assert is_centred or (bias is None and not replaces), "a norm that is not centred has no bias"
        self.weight, self.eps, self.dtype = None if weight is None else np.ascontiguousarray(weight), eps, dtype
        self._multiplier = multiplier
        self.bias = None if bias is None else np.ascontiguousarray(bias)
        #: The C struct of its constants. It points into this object.
        self.constants = NormWeights(
            None if self.weight is None else self.weight.ctypes.data,
            None if self.bias is None else self.bias.ctypes.data,
            is_centred,
            replaces,
            precedes,
        )
        self._run = library.function("norm", ctypes.POINTER(NormArguments))

    def __call__(self, x: Numbers) -> Numbers:
        """Return x normalised, [T, d] with dtype. x is [T, d], contiguous, float32 or bfloat16."""
        assert x.flags.c_contiguous, x.strides
        out = aligned_empty(x.shape, self.dtype)
        self._normalise(None, x, out)
        return out

    def after(self, hidden: Floats, x: Numbers) -> Numbers:
        """Add x [T, d] float32 or bfloat16 to hidden [T, d] float32 in place. Return hidden normalised, with dtype."""
        assert x.flags.c_contiguous, x.strides
        out = aligned_empty(hidden.shape, self.dtype)
        self._normalise(hidden.ctypes.data, x, out)
        return out

    def _normalise(self, hidden: int | None, x: Numbers, out: Numbers) -> None:
        self._run(
            NormArguments(
                hidden,
                x.ctypes.data,
                self.constants,
                out.ctypes.data,
                *x.shape,
                ELEMENT_NUMBERS[x.dtype],
                ELEMENT_NUMBERS[self.dtype],
                self.eps,
                self._multiplier,
            )
        )
