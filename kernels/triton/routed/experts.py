"""TritonExperts: a routed MLP on a device. It never waits for the host, so that a CUDA graph can capture it.

Its numerics level is that of the router's product and of the shared expert's.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from kernels.routing import Routing
from kernels.torch.linear import Operation
from kernels.triton.device import has_room
from kernels.triton.linear import DeviceLinear
from kernels.triton.routed.choose_experts import ChosenExperts
from kernels.triton.routed.expert_products import StackedProduct, down_products, gate_up_products, tile_shape
from kernels.triton.routed.expert_sum import expert_sum


class DeviceExpert(Protocol):
    """The parts of one expert."""

    @property
    def gate_up(self) -> DeviceLinear:
        """Return the product of gate and up."""

    @property
    def activation(self) -> Operation:
        """Return f(gate) * up."""

    @property
    def down(self) -> DeviceLinear:
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
    ) -> None:
        """Stack the experts' weights, which are stored in the stacks from then on.

        function: the experts' activation.
        """
        self._router, self._shared, self._function = router, shared, function
        self.gate_up = stacked([expert.gate_up for expert in experts])
        self.down = stacked([expert.down for expert in experts])
        device = self.down.weight.device
        self._choose = ChosenExperts(routing, len(experts), device)
        self._has_room = has_room(device)
        # A sum needs no more digits of the shared expert's result than of the others'.
        down = None if shared is None else shared.down
        self._shared_down = None if down is None else DeviceLinear(down.weight, down.bias, product=down.product)

    @property
    def variant(self) -> str:
        """Return the name of the products, for reports."""
        return f"triton-{self.down.weight.device.type}"

    def __call__(self, x: torch.Tensor, router_x: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output [T, d] of x [T, d] contiguous, of its dtype. router_x: what the router reads; None = x."""
        if len(x) == 0:
            return torch.empty_like(x)
        routing, num_experts = self._choose.routing, self._choose.num_experts
        shape = tile_shape(len(x) * routing.num_chosen, num_experts, x.dtype, has_room=self._has_room)
        logits = self._router(x if router_x is None else router_x)
        weights, tiles = self._choose(logits, shape.rows)
        hidden = gate_up_products(x, self.gate_up, tiles, routing.num_chosen, self._function, shape)
        results = down_products(hidden, self.down, tiles, shape)
        return expert_sum(results, weights, logits, self._of_all(x), has_gate=routing.has_shared_gate)

    def _of_all(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the shared expert's result."""
        if self._shared is None or self._shared_down is None:
            return None
        return self._shared_down(self._shared.activation(self._shared.gate_up(x)))


def stacked(products: Sequence[DeviceLinear]) -> StackedProduct:
    """Return the products' weights and biases, each in one piece of memory, which the products then use too."""
    weight = torch.stack([product.weight for product in products])
    for product, own in zip(products, weight, strict=True):
        product.weight = own  # frees the old memory
    biases = [product.bias for product in products if product.bias is not None]
    return StackedProduct(weight, torch.stack(biases) if biases else None)
