"""TorchExperts: a routed MLP made of torch's operations; its definition is kernels/cpu/experts.h."""

from dataclasses import dataclass
from typing import Protocol

import torch

from core.models.tensor import Operation
from kernels.torch.linear import TorchLinear


class TorchExpert(Protocol):
    """The parts of one expert."""

    @property
    def gate_up(self) -> TorchLinear:
        """The product of gate and up."""

    @property
    def activation(self) -> Operation:
        """f(gate) * up."""

    @property
    def down(self) -> TorchLinear:
        """The product that follows, to float32."""


@dataclass(frozen=True)
class TorchExperts:
    """The weighted sum of the experts that a router chooses for each row."""

    router: TorchLinear
    experts: tuple[TorchExpert, ...]
    num_chosen: int
    normalises: bool

    @property
    def variant(self) -> str:
        """Name of the choices that fix the results' bits; part of the fingerprint."""
        return self.router.variant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [T, d] of x [T, d], of its dtype."""
        logits = self.router(x)
        # A stable sort: of equal logits those of lower numbers come first.
        chosen = logits.argsort(dim=-1, descending=True, stable=True)[:, : self.num_chosen]
        weights = logits.softmax(-1).gather(1, chosen)
        if self.normalises:
            weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            expert = self.experts[number]
            result = expert.down(expert.activation(expert.gate_up(x[rows])))
            out.index_add_(0, rows, result * weights[rows, places, None])
        return out.to(x.dtype)
