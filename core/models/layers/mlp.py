"""The MLPs of layers: dense, or routed, with experts that are chosen for each token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from core.models.config import XIELU_NAMES, ExpertParts, ModelConfig
from core.models.operations.operations import Experts, Norm, Operations, Product
from core.models.operations.stream_arithmetic import StreamOperations
from core.models.operations.tensor import Operation, Tensor
from core.models.parts.weight_parts import WeightParts
from ipc.tables.arrays import Floats
from kernels.elements import FLOAT32
from kernels.routing import Routing


class Mlp(Protocol):
    """A layer's MLP."""

    @property
    def products(self) -> dict[str, Product]:
        """Return the MLP's products by name. All experts are one product."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the MLP's output [T, d] for its normalised input x [T, d]."""


@dataclass(frozen=True)
class DenseMlp:
    """down(activation(gate_up(x)))."""

    gate_up: Product
    activation: Operation
    down: Product

    @property
    def products(self) -> dict[str, Product]:
        """Return the MLP's products by name."""
        return {"gate_up": self.gate_up, "down": self.down}

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))


@dataclass(frozen=True)
class SparseMlp:
    """down(gelu(max(gate(x) - cut, 0)) * up(x)); cut: the mean of the gates and some standard deviations (Gemma 3n)."""

    gate: Product  # to float32, as `up`
    up: Product
    down: Product
    activation: Callable[[Tensor, Tensor], Tensor]  # of the results of gate and up

    @property
    def products(self) -> dict[str, Product]:
        """Return the MLP's products by name."""
        return {"sparse_gate": self.gate, "up": self.up, "down": self.down}

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x), self.up(x)))


@dataclass(frozen=True)
class RoutedMlp:
    """The weighted sum of the experts that the router chooses for each token, plus the shared expert."""

    experts: Experts

    @property
    def products(self) -> dict[str, Product]:
        """Return all experts as one product."""
        return {"experts": self.experts}

    def __call__(self, x: Tensor) -> Tensor:
        return self.experts(x)


@dataclass(frozen=True)
class ExpertsBeside:
    """A routed MLP alongside a dense one: both read the hidden states, under norms of their own, and are added."""

    input_norm: Norm
    router_norm: Norm
    routed: RoutedMlp
    dense_norm: Norm  # of what the dense MLP yields, to float32
    output_norm: Norm  # of what the experts yield, to float32

    def __call__(self, hidden: Tensor, dense: Tensor) -> Tensor:
        """Return the sum [T, d] float32. hidden [T, d] float32: the hidden states. dense: the dense MLP's output."""
        routed = self.routed.experts(self.input_norm(hidden), self.router_norm(hidden))
        total = self.dense_norm(dense)
        total += self.output_norm(routed)
        return total


def build_mlp(
    operations: Operations, parts: WeightParts, config: ModelConfig, index: int, *, is_dense: bool
) -> DenseMlp | SparseMlp | RoutedMlp:
    """Build the MLP of the layer with this index. is_dense: the one without a router, where a layer has both.

    Errors: ModelFileError naming tensors that are missing.
    """
    prefix, routed = f"model.layers.{index}.mlp.", config.experts
    halves = ("gate_up",) if config.fused_gate_up else ("gate", "up") if config.is_gated else ("up",)
    has_biases = config.mlp_bias if is_dense else routed is not None and routed.has_biases

    def gate_up(name: str) -> tuple[Product, Operation]:
        names = [f"{name}{half}_proj" for half in halves]
        weight = parts.take_matrix(*(f"{one}.weight" for one in names))
        if config.is_gated:
            return operations.gate_up(weight, config.hidden_act, bias(*names))
        constants = _constants(parts, name, config.xielu[index : index + 1]) if config.hidden_act == "xielu" else None
        return operations.activated(weight, config.hidden_act, bias(*names), constants)

    def bias(*names: str) -> Floats | None:
        return parts.take(*(f"{name}.bias" for name in names)) if has_biases else None

    if (num_deviations := config.sparse_gate(index)) is not None:
        return _sparse_mlp(operations, parts, prefix, num_deviations)
    if routed is None or is_dense:
        product, activation = gate_up(prefix)
        weight = parts.take_matrix(f"{prefix}down_proj.weight")
        return DenseMlp(product, activation, operations.linear(weight, bias(f"{prefix}down_proj")))
    # In the order of the weights' iterator, so that each one is packed before the next is read.
    gate = (f"{prefix}shared_expert_gate.weight",) if routed.has_shared_gate else ()
    router = operations.router(parts.take_matrix(f"{prefix}router.weight", *gate), bias(f"{prefix}router"))
    correction = parts.take(f"{prefix}router_correction.bias") if routed.has_correction else None

    def expert(name: str) -> DenseMlp:
        product, activation = gate_up(name)
        weight = parts.take_matrix(f"{name}down_proj.weight")
        return DenseMlp(product, activation, operations.linear(weight, bias(f"{name}down_proj"), out_dtype=FLOAT32))

    experts = [expert(f"{prefix}experts.{number}.") for number in range(routed.num_experts)]
    shared = expert(f"{prefix}shared_expert.") if routed.shared_size else None
    scales = parts.take(f"{prefix}expert_scales.weight") if routed.has_scales else None
    return RoutedMlp(operations.experts(router, experts, _routing(routed, correction, scales), shared))


def _sparse_mlp(operations: Operations, parts: WeightParts, prefix: str, num_deviations: float) -> SparseMlp:
    assert isinstance(operations, StreamOperations), type(operations)
    gate, up = (
        operations.linear(parts.take_matrix(f"{prefix}{name}_proj.weight"), out_dtype=FLOAT32)
        for name in ("gate", "up")
    )
    down = operations.linear(parts.take_matrix(f"{prefix}down_proj.weight"))
    return SparseMlp(gate, up, down, operations.streams().sparse_gate(num_deviations))


def _constants(parts: WeightParts, prefix: str, own: Sequence[Sequence[float]]) -> Floats:
    """Return xIELU's numbers in the order of gate.h. Files have the first two before a softplus. own: of this layer."""
    found = own[0] if own else parts.take(*(f"{prefix}{name}.weight" for name in XIELU_NAMES)).tolist()
    positive, negative, beta, limit = found
    return np.array([np.logaddexp(0, positive), beta + np.logaddexp(0, negative), beta, limit], np.float32)


def _routing(routed: ExpertParts, correction: Floats | None, scales: Floats | None) -> Routing:
    return Routing(
        routed.num_chosen,
        routed.normalises,
        routed.is_sigmoid,
        num_groups=routed.num_groups,
        num_chosen_groups=routed.num_chosen_groups,
        best_of_group=routed.best_of_group,
        scaling=routed.scaling,
        correction=correction,
        added_to_sum=routed.added_to_sum,
        scales=scales,
        scales_inputs=routed.scales_inputs,
        has_shared_gate=routed.has_shared_gate,
    )
