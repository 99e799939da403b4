"""Adapted products: the matrices of a model that adapters (LoRA) may change, and layers that apply adapters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from core.adapters.adapter import AdapterWeights
from core.adapters.file_matrix import FileMatrix
from core.models.config import ModelConfig
from core.models.layers.layer import Layer
from core.models.layers.mlp import DenseMlp
from core.models.operations.operations import AdaptingOperations, Product
from core.models.operations.tensor import Tensor
from core.models.operations.token_adapters import TokenAdapters
from kernels.low_rank import ProductShape

#: The matrices of each product of a layer, in the order of kernels/cpu/c/layers/decoder.h. MLPs without gates have no
#: gate_proj.
_PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


#: The products that all layers have. Experts do not support adapters, so the MLP products of their layers are empty.
_ATTENTION = ("qkv", "o")


class AdaptedMatrices:
    """The matrices of a decoder that adapters may change; an AdapterHost (core/adapters/store.py) with `pack`."""

    def __init__(
        self,
        config: ModelConfig,
        operations: AdaptingOperations,
        peft_layers: Mapping[str, FileMatrix] | None = None,
        gguf_layers: Mapping[str, FileMatrix] | None = None,
    ) -> None:
        """peft_layers, gguf_layers: the same matrices in these file formats; None = no file is read."""
        self.peft_layers, self.gguf_layers = peft_layers or {}, gguf_layers or {}
        self._operations, self._num_layers = operations, config.num_hidden_layers
        hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_heads = config.num_key_value_heads * config.head_dim
        matrices = {**_PRODUCTS, **({} if config.is_gated else {"gate_up": ("mlp.up_proj",)})}
        sizes = (config.intermediate_size,) * len(matrices["gate_up"])
        layer = {
            "qkv": ProductShape(hidden, (heads, kv_heads, kv_heads)),
            "o": ProductShape(heads, (hidden,)),
            "gate_up": ProductShape(hidden, sizes, is_gated=config.is_gated),
            "down": ProductShape(config.intermediate_size, (hidden,)),
        }
        self._matrices: Mapping[str, tuple[str, ...]] = matrices
        self._layer_shapes = [layer[name] for name in _PRODUCTS]
        #: [out, in] of each matrix by name.
        self.shapes: Mapping[str, tuple[int, int]] = {
            f"model.layers.{index}.{name}": (size, layer[product].depth)
            for index in range(self._num_layers)
            for product, names in matrices.items()
            if product in _ATTENTION or config.has_dense_mlp(index)
            for name, size in zip(names, layer[product].parts, strict=True)
        }

    def pack(self, weights: AdapterWeights) -> Any:
        """Return the adapter in the form that the model's operations use. Its matrices have the names of `shapes`."""
        products = [
            [weights.matrices.get(f"model.layers.{index}.{name}") for name in names]
            for index in range(self._num_layers)
            for names in self._matrices.values()
        ]
        return self._operations.pack_adapter(self._layer_shapes * self._num_layers, products)


@dataclass(frozen=True)
class _AdaptedProduct:
    """A product to which the adapters of a step's tokens add."""

    product: Product
    operations: AdaptingOperations
    adapters: TokenAdapters
    number: int  # of the product

    @property
    def variant(self) -> str:
        return self.product.variant

    def __call__(self, x: Tensor) -> Tensor:
        return self.operations.multiply_adapted(self.product, x, self.adapters, self.number)


def adapted_layer(layer: Layer, index: int, operations: AdaptingOperations, adapters: TokenAdapters) -> Layer:
    """Return the layer with this index, with products for a step that uses these adapters."""
    own = {
        name: _AdaptedProduct(layer.products[name], operations, adapters, index * len(_PRODUCTS) + number)
        for number, name in enumerate(_PRODUCTS)
        if name in layer.products
    }
    mixer, mlp = replace(layer.mixer, qkv=own["qkv"], o=own["o"]), layer.mlp
    if isinstance(mlp, DenseMlp):
        mlp = replace(mlp, gate_up=own["gate_up"], down=own["down"])
    return replace(layer, mixer=mixer, mlp=mlp)


def takes_adapters(layers: list[Layer]) -> bool:
    """Return whether all layers have the products that adapters support, or experts instead of the MLP's."""
    known = ([*_PRODUCTS], [*_ATTENTION, "experts"])
    return all(list(layer.products) in known and not layer.mixer.is_recurrent for layer in layers)
