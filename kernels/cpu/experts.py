"""CpuExperts: a routed MLP with the C kernel (kernels/cpu/c/layers/experts.h)."""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kernels.cpu.gemm import PackedMatrix, blocks_in_8_bits, row_bytes_in_8_bits
from kernels.cpu.group import SeparateMemory, SharedMemory
from kernels.cpu.library import CpuLibrary
from kernels.cpu.packed_weights import INT8
from kernels.cpu.structs import ExpertsArguments, ExpertsRoom, ExpertsStepArguments, GemmArguments, RoutingArguments
from kernels.elements import FLOAT32, Dtype, Numbers
from kernels.memory.aligned import aligned_empty
from kernels.routing import Routing

_EXPERT_ROWS = 512  # enum in experts.h
_INT32 = np.dtype(np.int32)


class ExpertProducts(Protocol):
    """The products of one expert."""

    @property
    def gate_up(self) -> PackedMatrix:
        """Return the product with a gate."""

    @property
    def down(self) -> PackedMatrix:
        """Return the product that follows, to float32."""


class CpuExperts:
    """Computes the weighted sum of some gated MLPs for each row, chosen by the router, and of a shared one.

    A row's bits do not depend on other rows. Weights of experts that no row has chosen are not read.
    """

    def __init__(
        self,
        library: CpuLibrary,
        router: PackedMatrix,
        experts: Sequence[ExpertProducts],
        routing: Routing,
        *,
        shared: ExpertProducts | None = None,
    ) -> None:
        """Prepare the C structs.

        router: [experts, width] to float32, with one more column for a shared gate. All experts have products of the
        same shapes. shared: the shared expert, of any size.
        """
        assert router.out_dtype == FLOAT32, router.out_dtype
        assert router.out_features == len(experts) + routing.has_shared_gate, (router.out_features, len(experts))
        assert len(experts) % routing.num_groups == 0, (len(experts), routing.num_groups)
        everyone = (*experts, shared) if shared is not None else tuple(experts)
        assert all(each.down.out_dtype == FLOAT32 for each in everyone), experts[0].down.out_dtype
        self.router, self.experts, self.shared, self.routing = router, tuple(experts), shared, routing
        gate_ups, downs = [each.gate_up for each in experts], [each.down for each in experts]
        own = [] if shared is None else [[shared.gate_up, shared.down]]
        self._matrices = [
            (GemmArguments * len(each))(*(one.arguments for one in each)) for each in (gate_ups, downs, *own)
        ]
        self._vectors = [
            None if one is None else np.ascontiguousarray(one, np.float32)
            for one in (routing.correction, routing.scales)
        ]
        correction, scales = (None if one is None else one.ctypes.data for one in self._vectors)
        #: The C struct; it points into this object.
        self.arguments = ExpertsArguments(
            router=router.arguments,
            gate_up=ctypes.addressof(self._matrices[0]),
            down=ctypes.addressof(self._matrices[1]),
            shared=ctypes.addressof(self._matrices[2]) if own else None,
            routing=RoutingArguments(
                correction=correction,
                scaling=routing.scaling,
                num_experts=len(experts),
                num_chosen=routing.num_chosen,
                is_sigmoid=routing.is_sigmoid,
                normalises=routing.normalises,
                num_groups=routing.num_groups,
                num_chosen_groups=routing.num_chosen_groups,
                best_of_group=routing.best_of_group,
                added_to_sum=routing.added_to_sum,
                scales_inputs=routing.scales_inputs,
                scales=scales,
            ),
            has_shared_gate=routing.has_shared_gate,
            width=router.in_features,
        )
        self._run = library.function("experts", ctypes.POINTER(ExpertsStepArguments))

    def __call__(self, x: Numbers, router_x: Numbers | None = None) -> Numbers:
        """Return the MLP's output [T, width] of the model's dtype. x is [T, width] of that dtype, contiguous.

        router_x: the same for the router; None = x."""
        assert x.dtype == self.experts[0].gate_up.dtype, x.dtype
        assert x.flags.c_contiguous, x.strides
        assert router_x is None or (router_x.dtype == x.dtype and router_x.flags.c_contiguous), router_x
        y, room = aligned_empty(x.shape, x.dtype), Room()
        room.reserve(len(x), self)
        step = ExpertsStepArguments(
            ctypes.addressof(self.arguments),
            ctypes.addressof(room.arguments),
            x.ctypes.data,
            y.ctypes.data,
            len(x),
            None if router_x is None else router_x.ctypes.data,
        )
        self._run(step)
        return y

    @property
    def variant(self) -> str:
        """Return the names of the choices that determine the results' bits; part of the fingerprint."""
        first, own = self.experts[0], "" if self.shared is None else "+shared"
        return f"{self.router.variant}+{first.gate_up.variant}+{first.down.variant}{own}"

    @property
    def matrices(self) -> list[PackedMatrix]:
        """Return the matrices of all experts."""
        everyone = self.experts if self.shared is None else (*self.experts, self.shared)
        return [matrix for each in everyone for matrix in (each.gate_up, each.down)]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(each.packed.nbytes for each in (self.router, *self.matrices))

    def set_streams(self, streams: bool) -> None:
        """Set whether the caches are too small to keep the weights from one step to the next (gemm.h)."""
        for matrices in self._matrices:
            for each in matrices:
                each.streams = streams


class Room:
    """Memory in which all routed MLPs of a model are computed in turn. It only grows.

    memory: that of a rank's group; None = this process is alone.
    """

    def __init__(self, memory: SharedMemory | SeparateMemory | None = None) -> None:
        self.arguments, self._memory = ExpertsRoom(), memory
        self._rows = 0
        self._kept: dict[str, Numbers] = {}

    def reserve(self, num_rows: int, experts: CpuExperts) -> None:
        """Make room for num_rows rows of these experts. All experts of a model have the same shapes."""
        rows = min(num_rows, _EXPERT_ROWS)
        if rows <= self._rows:
            return
        self._rows = rows = min(1 << (rows - 1).bit_length(), _EXPERT_ROWS)
        gate_up, down, shared = experts.experts[0].gate_up, experts.experts[0].down, experts.shared
        num_experts, routing = len(experts.experts), experts.routing
        chosen = rows * routing.num_chosen
        self._keep("logits", (rows, experts.router.out_features), FLOAT32)
        self._keep("keys", (rows, num_experts + routing.num_groups), FLOAT32)
        self._keep("chosen", (chosen,), _INT32)
        self._keep("weights", (chosen,), FLOAT32)
        self._keep("places", (chosen,), _INT32)
        self._keep("starts", (num_experts + 1,), _INT32)
        self._keep("active", (num_experts + 1,), _INT32)
        self._keep("gathered", (chosen, gate_up.in_features), gate_up.dtype)
        self._keep("gated", (chosen, down.in_features), down.dtype, "expert_gated")
        self._keep("results", (chosen, down.out_features), FLOAT32)
        if shared is not None:
            self._keep("shared_gated", (rows, shared.down.in_features), down.dtype, "shared_gated")
            self._keep("shared_results", (rows, down.out_features), FLOAT32)
        if deepest := max((each.in_features for each in experts.matrices if each.packing == INT8), default=0):
            self._keep("quantized", (chosen + rows, row_bytes_in_8_bits(deepest)), np.dtype(np.uint8))
            self.arguments.quantized_stride = blocks_in_8_bits(deepest)

    def _keep(self, name: str, shape: tuple[int, ...], dtype: Dtype, shared: str = "") -> None:
        """Make room. shared: its name in the group's memory; "" = it is this process's own."""
        if self._memory is not None and shared in self._memory:
            buffer = self._memory.reserve(shared, shape, dtype)
        else:
            buffer = aligned_empty(shape, dtype)
        self._kept[name] = buffer
        setattr(self.arguments, name, buffer.ctypes.data)
