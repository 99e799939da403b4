"""TorchExperts: a routed MLP with torch's operations. It is defined in kernels/cpu/c/layers/experts.h."""

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.routing import Routing
from kernels.torch.linear import Operation, TorchLinear


class TorchExpert(Protocol):
    """The parts of one expert."""

    @property
    def gate_up(self) -> TorchLinear:
        """Return the product of gate and up."""

    @property
    def activation(self) -> Operation:
        """Return f(gate) * up."""

    @property
    def down(self) -> TorchLinear:
        """Return the product that follows, to float32."""


@dataclass(frozen=True)
class TorchExperts:
    """The weighted sum of the experts that a router chooses for each row."""

    router: TorchLinear
    experts: tuple[TorchExpert, ...]
    routing: Routing
    shared: TorchExpert | None = None

    @property
    def variant(self) -> str:
        """Return the names of the choices that determine the results' bits; part of the fingerprint."""
        return self.router.variant

    def __call__(self, x: torch.Tensor, router_x: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output [T, d] of x [T, d], of its dtype. router_x: the same for the router; None = x."""
        logits = self.router(x if router_x is None else router_x)
        chosen, weights = choose_experts(self.routing, logits[:, : len(self.experts)])
        out = torch.zeros(x.shape, dtype=torch.float32)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            own = weights[rows, places, None]
            if self.routing.scales_inputs:
                out.index_add_(0, rows, _result(self.experts[number], (x[rows] * own).to(x.dtype)))
            else:
                out.index_add_(0, rows, _result(self.experts[number], x[rows]) * own)
        if self.shared is not None:
            result = _result(self.shared, x)
            out += result * logits[:, -1:].sigmoid() if self.routing.has_shared_gate else result
        return out.to(x.dtype)


def _result(expert: TorchExpert, x: torch.Tensor) -> torch.Tensor:
    return expert.down(expert.activation(expert.gate_up(x)))


def choose_experts(routing: Routing, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's experts, best first, and their weights, both [T, num_chosen]; logits [T, experts]."""
    scores = logits.sigmoid() if routing.is_sigmoid else logits.softmax(-1)
    keys = logits if routing.correction is None else scores + torch.from_numpy(routing.correction)
    if routing.num_chosen_groups < routing.num_groups:
        groups = keys.view(len(keys), routing.num_groups, -1)
        best = groups.topk(routing.best_of_group, -1).values.sum(-1)
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, _largest(best, routing.num_chosen_groups), False)
        keys = groups.masked_fill(left_out[:, :, None], -torch.inf).view_as(keys)
    chosen = _largest(keys, routing.num_chosen)
    weights = scores.gather(1, chosen)
    if routing.normalises:
        weights /= weights.sum(-1, keepdim=True).clamp(min=1e-20) + routing.added_to_sum
    weights = weights * routing.scaling
    return chosen, weights if routing.scales is None else weights * torch.from_numpy(routing.scales)[chosen]


def _largest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest numbers [T, n] of each row.

    On a tie the first wins, because the sort is stable.
    """
    return numbers.argsort(dim=-1, descending=True, stable=True)[:, :count]
