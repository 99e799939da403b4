"""TritonExperts: a routed MLP on a device. It never waits for the host, so that a CUDA graph can capture it.

Its numerics level is that of the router's product and of the shared expert's.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch

from kernels.routing import ExpertColumns, Routing
from kernels.torch.linear import Operation
from kernels.torch.packed_rows import join
from kernels.triton.device import has_room
from kernels.triton.fp8.fp8_linear import Fp8Linear
from kernels.triton.linear import DeviceLinear
from kernels.triton.packed_linear import PackedLinear
from kernels.triton.routed.choose_experts import ChosenExperts
from kernels.triton.routed.expert_products import StackedProduct, down_products, gate_up_products, tile_shape
from kernels.triton.routed.expert_sum import expert_sum
from kernels.triton.routed.packed_experts import PackedStack, Scratch, joins_all

AnyLinear: TypeAlias = DeviceLinear | PackedLinear | Fp8Linear


class DeviceExpert(Protocol):
    """The parts of one expert."""

    @property
    def gate_up(self) -> AnyLinear:
        """Return the product of gate and up."""

    @property
    def activation(self) -> Operation:
        """Return f(gate) * up."""

    @property
    def down(self) -> AnyLinear:
        """Return the product that follows."""


class TritonExperts:
    """The weighted sum of the experts that a router chooses for each row, plus the shared expert."""

    def __init__(
        self,
        router: DeviceLinear,
        experts: Sequence[DeviceExpert],
        routing: Routing,
        shared: DeviceExpert | None,
        *,
        function: str,
        scratch: Scratch | None = None,
    ) -> None:
        """Stack the experts' weights, which are stored in the stacks from then on.

        function: the experts' activation. scratch: for weights that are quantized; None: memory of their own.
        """
        self._router, self._shared, self._function = router, shared, function
        scratch = scratch or Scratch()
        self.gate_up = stacked([expert.gate_up for expert in experts], scratch)
        self.down = stacked([expert.down for expert in experts], scratch)
        self._device = device = router.weight.device
        self._choose = ChosenExperts(routing, len(experts), device)
        is_packed = isinstance(self.gate_up, PackedStack) or isinstance(self.down, PackedStack)
        self._used = torch.zeros(len(experts), dtype=torch.int32, device=device) if is_packed else None
        self._has_room = has_room(device)
        # A sum needs no more digits of the shared expert's result than of the others'.
        self._shared_down = None if shared is None else shared.down.in_own_dtype()
        self._columns = ExpertColumns()

    def share_columns(self, columns: ExpertColumns) -> None:
        """Give results of all ranks from now on; see SharesExperts (core/models/operations/operations.py)."""
        self._columns = columns

    @property
    def variant(self) -> str:
        """Return the name of the products, for reports."""
        return f"triton-{self._device.type}"

    def __call__(self, x: torch.Tensor, router_x: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output [T, d] of x [T, d] contiguous, of its dtype. router_x: what the router reads; None = x."""
        if len(x) == 0:
            return torch.empty_like(x)
        routing, num_experts = self._choose.routing, self._choose.num_experts
        shape = tile_shape(len(x) * routing.num_chosen, num_experts, x.dtype, has_room=self._has_room)
        logits = self._router(x if router_x is None else router_x)
        weights, tiles = self._choose(logits, shape.rows, self._used)
        read, num_chosen = x, routing.num_chosen
        if routing.scales_inputs:  # each pair of a token and an expert reads a row of its own
            read, num_chosen = (x[:, None] * weights[:, :, None]).to(x.dtype).flatten(0, 1), 1
            weights = torch.ones_like(weights)
        hidden = gate_up_products(read, self._dense(self.gate_up), tiles, num_chosen, self._function, shape)
        results = down_products(self._columns.activated(hidden), self._dense(self.down), tiles, shape)
        total = expert_sum(results, weights, logits, self._of_all(x), has_gate=routing.has_shared_gate)
        summed: torch.Tensor = self._columns.summed(total)
        return summed

    def _dense(self, product: StackedProduct | PackedStack) -> StackedProduct:
        """Return the product with the weights of the experts that the step chose."""
        if isinstance(product, StackedProduct):
            return product
        assert self._used is not None, "packed experts"
        return product.unpacked(self._used)

    def _of_all(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the shared expert's result."""
        if self._shared is None or self._shared_down is None:
            return None
        return self._shared_down(self._columns.shared(self._shared.activation(self._shared.gate_up(x))))


def stacked(experts: Sequence[AnyLinear], scratch: Scratch) -> StackedProduct | PackedStack:
    """Return the products' weights and biases, each in one piece of memory, in place of the products' own.

    Weights that are quantized stay so, if all of them are, in the same way. What they are multiplied by is not
    quantized.
    """
    products = [product.with_whole_inputs() if isinstance(product, Fp8Linear) else product for product in experts]
    biases = [product.bias for product in products if product.bias is not None]
    bias = torch.stack(biases) if biases else None
    packed = [product for product in products if isinstance(product, PackedLinear)]
    parts = [part for product in packed for part in product.parts]
    if len(packed) == len(products) and joins_all(parts):
        for product in packed:
            product.parts = ()  # frees the old memory, together with `parts`
        rows, dtype = join(parts), packed[0].dtype
        parts.clear()
        return PackedStack(rows, bias, len(products), dtype=dtype, scratch=scratch)
    weight = torch.stack([one.weight if isinstance(one, DeviceLinear) else one.dense_weight() for one in products])
    for one, own in zip(products, weight, strict=True):
        if isinstance(one, DeviceLinear):
            one.weight = own  # frees the old memory
        else:
            one.parts = ()
    return StackedProduct(weight, bias)
