"""CpuExperts: a routed MLP by the C kernel (kernels/cpu/experts.h)."""

import ctypes
from collections.abc import Sequence

import numpy as np

from kernels.cpu.gemm import INT8, PackedMatrix, blocks_in_8_bits, row_bytes_in_8_bits
from kernels.cpu.library import CpuLibrary
from kernels.cpu.structs import ExpertsArguments, ExpertsRoom, ExpertsStepArguments, GemmArguments
from kernels.elements import FLOAT32, Dtype, Numbers
from kernels.memory.aligned import aligned_empty

_EXPERT_ROWS = 512  # enum in experts.h
_INT32 = np.dtype(np.int32)


class CpuExperts:
    """Computes the weighted sum of num_chosen gated MLPs for each row, those with the row's largest router logits.

    A row's weights are the softmax of its logits; with `normalises` those of the chosen experts sum to 1. A row's bits
    do not depend on other rows. Weights of experts that no row has chosen are not read."""

    def __init__(
        self,
        library: CpuLibrary,
        router: PackedMatrix,
        gate_ups: Sequence[PackedMatrix],
        downs: Sequence[PackedMatrix],
        num_chosen: int,
        *,
        normalises: bool,
    ) -> None:
        """Prepare the C structs. router: [experts, width] to float32. gate_ups, downs: of each expert; the first have a
        gate, the second give float32. All gate_ups have one shape, and so have all downs."""
        assert router.out_dtype == FLOAT32, router.out_dtype
        assert downs[0].out_dtype == FLOAT32, downs[0].out_dtype
        self.router, self.gate_ups, self.downs, self.num_chosen = router, tuple(gate_ups), tuple(downs), num_chosen
        self._matrices = [(GemmArguments * len(each))(*(one.arguments for one in each)) for each in (gate_ups, downs)]
        #: The C struct; it points into this object.
        self.arguments = ExpertsArguments(
            router=router.arguments,
            gate_up=ctypes.addressof(self._matrices[0]),
            down=ctypes.addressof(self._matrices[1]),
            num_experts=len(gate_ups),
            num_chosen=num_chosen,
            normalises=normalises,
            width=router.in_features,
        )
        self._run = library.function("experts", ctypes.POINTER(ExpertsStepArguments))

    def __call__(self, x: Numbers) -> Numbers:
        """Return the MLP's output [T, width] of the model's dtype. x is [T, width] of that dtype, contiguous."""
        assert x.dtype == self.gate_ups[0].dtype, x.dtype
        assert x.flags.c_contiguous, x.strides
        y, room = aligned_empty(x.shape, x.dtype), Room()
        room.reserve(len(x), self)
        step = ExpertsStepArguments(
            ctypes.addressof(self.arguments), ctypes.addressof(room.arguments), x.ctypes.data, y.ctypes.data, len(x)
        )
        self._run(step)
        return y

    @property
    def variant(self) -> str:
        """Name of the choices that fix the results' bits; part of the fingerprint."""
        return f"{self.router.variant}+{self.gate_ups[0].variant}+{self.downs[0].variant}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(each.packed.nbytes for each in (self.router, *self.gate_ups, *self.downs))

    def set_streams(self, streams: bool) -> None:
        """Say whether the caches cannot keep the weights from one step to the next (gemm.h)."""
        for matrices in self._matrices:
            for each in matrices:
                each.streams = streams


class Room:
    """Memory in which all routed MLPs of a model are computed, one after the other. It only grows."""

    def __init__(self) -> None:
        self.arguments = ExpertsRoom()
        self._rows = 0
        self._kept: dict[str, Numbers] = {}

    def reserve(self, num_rows: int, experts: CpuExperts) -> None:
        """Make room for so many rows of these experts. All experts of a model have the same shapes."""
        rows = min(num_rows, _EXPERT_ROWS)
        if rows <= self._rows:
            return
        self._rows = rows = min(1 << (rows - 1).bit_length(), _EXPERT_ROWS)
        gate_up, down, num_experts = experts.gate_ups[0], experts.downs[0], len(experts.gate_ups)
        chosen = rows * experts.num_chosen
        self._keep("logits", (rows, num_experts), FLOAT32)
        self._keep("chosen", (chosen,), _INT32)
        self._keep("weights", (chosen,), FLOAT32)
        self._keep("places", (chosen,), _INT32)
        self._keep("starts", (num_experts + 1,), _INT32)
        self._keep("active", (num_experts + 1,), _INT32)
        self._keep("gathered", (chosen, gate_up.in_features), gate_up.dtype)
        self._keep("gated", (chosen, down.in_features), down.dtype)
        self._keep("results", (chosen, down.out_features), FLOAT32)
        matrices = (*experts.gate_ups, *experts.downs)
        if deepest := max((each.in_features for each in matrices if each.packing == INT8), default=0):
            self._keep("quantized", (chosen, row_bytes_in_8_bits(deepest)), np.dtype(np.uint8))
            self.arguments.quantized_stride = blocks_in_8_bits(deepest)

    def _keep(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> None:
        self._kept[name] = buffer = aligned_empty(shape, dtype)
        setattr(self.arguments, name, buffer.ctypes.data)
