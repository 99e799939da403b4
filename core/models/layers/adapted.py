"""Adapted products: the matrices of a model that adapters (LoRA) may change, and layers that apply adapters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from core.adapters.adapter import AdapterWeights
from core.adapters.file_matrix import FileMatrix
from core.models.config import ModelConfig
from core.models.layers.adapted_tables import AdaptedTables, table_shapes
from core.models.layers.layer import Layer
from core.models.layers.mlp import DenseMlp
from core.models.operations.operations import AdaptingOperations, ExchangingProduct, Product
from core.models.operations.tensor import Tensor
from core.models.operations.token_adapters import TokenAdapters
from kernels.low_rank import LowRank, ProductShape
from kernels.value_form import SIDES

#: The matrices of each product of a layer, in the order of kernels/cpu/c/layers/decoder.h. MLPs without gates have no
#: gate_proj.
_PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "gate": (),  # of attention's output; see _names()
}

#: Experts do not support adapters, so the MLP products of their layers are empty.
_MLP = ("gate_up", "down")
#: Products of layers alongside those above, which take no adapters.
_WITHOUT = ("own_gate", "own_out")


class AdaptedPart(NamedTuple):
    """What of a model a process computes: some layers, and of each matrix the rows in `rows`.

    rows: of each layer of the model, by the matrix's name in it, (first, end) of each range; a matrix that is not named
    is whole. () = all are.
    """

    layers: Sequence[int]
    rows: Sequence[Mapping[str, Sequence[tuple[int, int]]]]


class AdaptedMatrices:
    """The matrices of a model that adapters may change; an AdapterHost (core/adapters/store.py) with `pack`."""

    def __init__(
        self,
        config: ModelConfig,
        operations: AdaptingOperations | None,
        peft_layers: Mapping[str, FileMatrix] | None = None,
        gguf_layers: Mapping[str, FileMatrix] | None = None,
        *,
        part: AdaptedPart | None = None,
    ) -> None:
        """config: of the whole model. operations: None = adapters are only read here.

        peft_layers, gguf_layers: the same matrices in these file formats; None = no file is read. part: what this
        process computes; None = all.
        """
        self.peft_layers, self.gguf_layers = peft_layers or {}, gguf_layers or {}
        self._operations, every = operations, range(config.num_hidden_layers)
        self._part = part or AdaptedPart(every, ())
        #: Of each layer, by product: its shape, and the names of its matrices.
        self._layers = [_shapes(config, index) for index in every]
        self._names = [_names(config, index) for index in every]
        #: [out, in] of each matrix by name.
        self.shapes: dict[str, tuple[int, int]] = {
            f"model.layers.{index}.{name}": (size, self._layers[index][product].depth)
            for index in every
            for product, names in self._names[index].items()
            if product not in _MLP or config.has_dense_mlp(index)
            for name, size in zip(names, self._layers[index][product].parts, strict=True)
        }
        self._tables, self._num_words = table_shapes(config), config.vocab_size
        self.shapes |= self._tables

    @property
    def product_shapes(self) -> list[ProductShape]:
        """Return the shapes of the process's products, layer after layer."""
        return [
            shape._replace(parts=self._num_rows(index, self._names[index][product], shape.parts))
            for index in self._part.layers
            for product, shape in self._layers[index].items()
        ]

    def _num_rows(self, index: int, names: Sequence[str], counts: Sequence[int]) -> tuple[int, ...]:
        """Return how many rows of these matrices of a layer the process has. counts: all."""
        every = [self._rows_of(index, name) for name in names]
        return tuple(
            count if own is None else sum(end - first for first, end in own)
            for own, count in zip(every, counts, strict=True)
        )

    def _rows_of(self, index: int, name: str) -> Sequence[tuple[int, int]] | None:
        return self._part.rows[index].get(name) if self._part.rows else None

    def pack(self, weights: AdapterWeights) -> Any:
        """Return the adapter in the form that the model's operations use. Its matrices have the names of `shapes`."""
        assert self._operations is not None, "adapters are only read here"
        products = [
            [self._own(index, name, weights.matrices.get(f"model.layers.{index}.{name}")) for name in names]
            for index in self._part.layers
            for names in self._names[index].values()
        ]
        packed = self._operations.pack_adapter(self.product_shapes, products)
        tables = {name: weights.matrices[name] for name in self._tables if name in weights.matrices}
        return AdaptedTables(packed, tables, self._num_words) if tables else packed

    def _own(self, index: int, name: str, matrix: LowRank | None) -> LowRank | None:
        """Return what an adapter adds to the process's rows of a matrix of a layer."""
        own = self._rows_of(index, name)
        if matrix is None or own is None:
            return matrix
        return matrix._replace(b=np.concatenate([matrix.b[first:end] for first, end in own]))


def _names(config: ModelConfig, index: int) -> dict[str, tuple[str, ...]]:
    """Return the names of the matrices of each product of a layer."""
    names: dict[str, tuple[str, ...]] = {**_PRODUCTS, **({} if config.has_gates else {"gate_up": ("mlp.up_proj",)})}
    if config.recurrent is not None and index in config.recurrent_layers:
        inputs = tuple(f"mixer.{name}" for name in config.recurrent.inputs)
        return names | {"qkv": inputs, "o": ("mixer.out_proj",)}
    if config.output_gate or config.head_gates:
        names["gate"] = ("self_attn.q_gate",) if config.output_gate else ("self_attn.g_proj",)
    return names | {"qkv": names["qkv"][: 1 + SIDES[config.value_form(index)]]}


def _shapes(config: ModelConfig, index: int) -> dict[str, ProductShape]:
    """Return the shape of each product of a layer."""
    hidden, size, (kv_heads, head_dim) = config.hidden_size, config.mlp_size(index), config.heads_of(index)
    mlp = {
        "gate_up": ProductShape(hidden, (size,) * (2 if config.has_gates else 1), is_gated=config.has_gates),
        "down": ProductShape(size, (hidden,)),
    }
    if config.recurrent is not None and index in config.recurrent_layers:
        inputs = ProductShape(hidden, tuple(config.recurrent.input_widths.values()))
        output = ProductShape(config.recurrent.sizes.out_width, (hidden,))
        return {"qkv": inputs, "o": output, **mlp, "gate": ProductShape(hidden, ())}
    heads = config.num_attention_heads * head_dim
    gates = (heads,) if config.output_gate else (config.num_attention_heads,) * config.head_gates
    return {
        "qkv": ProductShape(hidden, (heads, *(kv_heads * head_dim,) * SIDES[config.value_form(index)])),
        "o": ProductShape(heads, (hidden,)),
        **mlp,
        "gate": ProductShape(hidden, gates),
    }


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
    own: dict[str, Any] = {}
    for number, name in enumerate(_PRODUCTS, index * len(_PRODUCTS)):
        if (product := layer.products.get(name)) is not None:
            change = partial(_AdaptedProduct, operations=operations, adapters=adapters, number=number)
            own[name] = product.around(change) if isinstance(product, ExchangingProduct) else change(product)
    mixer, mlp = replace(layer.mixer, qkv=own["qkv"], o=own["o"]), layer.mlp
    if mixer.output_gate is not None:
        mixer = replace(mixer, output_gate=replace(mixer.output_gate, product=own["gate"]))
    if isinstance(mlp, DenseMlp):
        mlp = replace(mlp, gate_up=own["gate_up"], down=own["down"])
    return replace(layer, mixer=mixer, mlp=mlp)


def takes_adapters(layers: list[Layer]) -> bool:
    """Return whether all layers have the products that adapters know, or experts in place of the MLP's, or no MLP."""
    known = {*_PRODUCTS, *_WITHOUT, "experts"}
    return all(set(layer.products) <= known for layer in layers)
