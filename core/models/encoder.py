"""Encoder: models whose tokens see the whole prompt (BERT, RoBERTa, ModernBERT), of a decoder's operations.

A prompt is computed in one step, so no K or V is kept after it, and all layers share the cache memory of one. On a CPU
the step is the decoder's C call (kernels/cpu/c/layers/decoder.h) without a head.
"""

from collections.abc import Iterable

import numpy as np

from core.models.config import ModelConfig
from core.models.layers.adapted_tables import AdaptedTables
from core.models.layers.layer import Layer, NormNumbers
from core.models.layers.layer_kinds import kind_of
from core.models.layers.mixers import Mixer
from core.models.layers.mlp import DenseMlp
from core.models.llama import Llama
from core.models.operations.operations import Norm, Operations, Product
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.operations.unchanged import unchanged
from core.models.operations.weight_form import WeightForm
from core.models.parts.weight_parts import WeightParts
from core.models.step import ONCE, ModelInputs, StepResult
from ipc.options.model_options import Numerics
from ipc.tables.arrays import Floats
from kernels.cpu.library import CpuLibrary
from kernels.elements import FLOAT32, Dtype, to_floats


class Encoder(Llama):
    """The weights and the forward pass of one encoder."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        dtype: Dtype,
        library: CpuLibrary | None = None,
        *,
        form: WeightForm = WeightForm.STORED,
        operations: Operations | None = None,
        numerics: Numerics = "L2",
    ) -> None:
        """Pack the weights and build the layers.

        weights: (name, weight) pairs with the names of core/model_files/tensors/encoder_weights.py, preferably in their
        order. library, form, operations: see Llama.
        Errors: ModelFileError naming missing tensors.
        """
        assert config.encoder is not None, config.architecture
        self._kind = config.encoder
        #: The layers after the pooling, by name; empty for a model that does not classify. Vectors are [d], float32.
        self.label_weights: dict[str, Floats] = {}
        super().__init__(config, weights, dtype, numerics, library=library, operations=operations, form=form)

    def _build_begin(self, parts: WeightParts) -> Product | None:
        """Build the embedding of words, positions and kinds of tokens. Return None: there is no head."""
        kind, tables = self._kind, dict[str, Floats]()
        words = parts.take_matrix("embeddings.words.weight")
        for name, count in {"positions": kind.num_positions, "kinds": kind.num_kinds}.items():
            if count:
                tables[name] = to_floats(parts.take_matrix(f"embeddings.{name}.weight").dense(self.dtype)).copy()
        places = tables.get("positions")
        if places is not None:
            places = places[kind.first_position :].copy()
        self.embedding = self.operations.embedding(words, 1.0, None, places, tables.get("kinds"))
        return None

    def _build_layers(self, parts: WeightParts) -> list[Layer]:
        """Build the layers. A norm behind a layer is that of the next one's input."""
        follows, layers = self._kind.norms_follow, list[Layer]()
        before = self._numbers(parts, "embeddings.norm")
        for index in range(self.config.num_hidden_layers):
            if index and not follows:
                before = self._numbers(parts, f"layers.{index}.attention_norm")
            # The first layer reads the embeddings' norm, and adds to it.
            layers.append(self._layer(parts, index, self._built(before, self.dtype, replaces=follows or not index)))
            if follows:
                before = self._numbers(parts, f"layers.{index}.mlp_norm")
        self._last = before if follows else self._numbers(parts, "final_norm")
        return layers

    def _build_end(self, parts: WeightParts, head: Product | None) -> None:
        """Build what follows the layers."""
        self._norm = self._built(self._last, self.dtype, replaces=self._kind.norms_follow)
        self._float_norm = self._built(self._last, FLOAT32)
        for name, shape in head_shapes(self.config).items():
            is_vector = len(shape) == 1
            self.label_weights[name] = parts.take(name) if is_vector else self._matrix(parts.take_matrix(name))

    def _matrix(self, weight: StoredMatrix) -> Floats:
        return to_floats(weight.dense(self.dtype)).copy()

    def _numbers(self, parts: WeightParts, name: str) -> NormNumbers:
        return NormNumbers(parts.take(f"{name}.weight"), parts.take(f"{name}.bias") if self._kind.has_biases else None)

    def _built(self, norm: NormNumbers, dtype: Dtype, *, replaces: bool = False) -> Norm:
        eps = self.config.rms_norm_eps
        return self.operations.norm(norm.weight, eps, dtype, bias=norm.bias, is_centred=True, replaces=replaces)

    def _layer(self, parts: WeightParts, index: int, before: Norm) -> Layer:
        """Build a layer. before: the norm of its input."""
        kind, operations, name = self._kind, self.operations, f"layers.{index}."

        def taken(*stems: str) -> tuple[StoredMatrix, Floats | None]:
            weight = parts.take_matrix(*(f"{name}{stem}.weight" for stem in stems))
            has_biases = kind.has_biases and kind.products_have_biases
            return weight, parts.take(*(f"{name}{stem}.bias" for stem in stems)) if has_biases else None

        qkv = operations.linear(*(taken("qkv") if kind.has_fused_qkv else taken("q", "k", "v")))
        attend = operations.attention(kind_of(self.config, index), None)
        mixer = Mixer(qkv, attend, operations.linear(*taken("o")), self.config.place_of(index))
        norm = self._numbers(parts, f"{name}{'attention_out_norm' if kind.norms_follow else 'mlp_norm'}")
        if kind.is_gated:
            weight, bias = taken("up") if kind.has_fused_gate else taken("gate", "up")
            up, activation = operations.gate_up(weight, kind.activation, bias)
        else:
            weight, bias = taken("up")
            up, activation = operations.activated(weight, kind.activation, bias)
        return Layer(
            kind=kind_of(self.config, index),
            input_norm=before,
            mixer=mixer,
            attention_out=unchanged,
            mlp_norm=self._built(norm, self.dtype, replaces=kind.norms_follow),
            mlp=DenseMlp(up, activation, operations.linear(*taken("down"))),
            mlp_out=unchanged,
        )

    def forward(self, inputs: ModelInputs) -> StepResult:
        """Run one step. On a CPU the embeddings of tokens whose adapters change tables are given to it."""
        adapters = inputs.adapters
        changing = (
            {}
            if adapters is None
            else {index: one for index, one in enumerate(adapters.packed) if isinstance(one, AdaptedTables)}
        )
        if adapters is None or not changing:
            return super().forward(inputs)
        places = np.flatnonzero(np.isin(adapters.of_token, list(changing)))
        ids, rows_of = np.ascontiguousarray(inputs.token_ids[places]), adapters.of_token[places]
        rows = self.embedding(ids, np.ascontiguousarray(inputs.positions[places]))
        for index, one in changing.items():
            own = rows_of == index
            changed = rows[own]
            one.add(changed, ids[own])
            rows[own] = changed
        token_ids = inputs.token_ids.copy()
        token_ids[places] = -1 - np.arange(len(places))
        return super().forward(inputs._replace(token_ids=token_ids, given=rows, generation=ONCE))

    @property
    def product_variants(self) -> dict[str, str]:
        """Return the variants of the first layer's products, by the names that they have in fingerprints."""
        products = self.layers[0].products
        return {"up" if name == "gate_up" else name: product.variant for name, product in products.items()}


def head_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a classifying encoder's layers after the pooling, by name."""
    parts, hidden = config.encoder, config.hidden_size
    if parts is None or parts.head == "none":
        return {}
    shapes: dict[str, tuple[int, ...]] = {"head.dense.weight": (hidden, hidden)}
    if parts.head_has_biases:
        shapes["head.dense.bias"] = (hidden,)
    if parts.head == "gelu and norm":
        shapes["head.norm.weight"] = (hidden,)
    return shapes | {"head.out.weight": (config.num_labels, hidden), "head.out.bias": (config.num_labels,)}
