"""CpuPerLayerInputs: inputs of single layers alongside the residual stream, by the C kernel (c/layers/per_layer.h)."""

import ctypes

import numpy as np

from kernels.arrays import Floats, Ints
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.mixer_structs import PerLayerInputsArguments, PerLayerStepArguments
from kernels.cpu.structs import EmbeddingArguments
from kernels.elements import Dtype, Numbers, rounded

MAX_WIDTH = 4096  # enum in per_layer.h


class CpuPerLayerInputs:
    """What all layers with inputs of their own share: a table of tokens, and a projection of the tokens' embeddings."""

    def __init__(
        self,
        library: CpuLibrary,
        table: CpuEmbedding | None,
        projection: PackedMatrix,
        *,
        norm: Floats,
        eps: float,
        given_id: int = 0,
        place: tuple[int, int] | None = None,
    ) -> None:
        """table: of rows [tokens * layers, width]; None = inputs follow from the projection alone. projection: to
        layers * width. norm [width] float32: of a layer's part of the projection. given_id: the token whose rows of the
        table the tokens with ids below 0 have. place: how many layers come first in the table, and how many it has;
        None = it has the same as the projection."""
        self.width = width = len(norm)
        assert table is None or table.width == width, (table, width)
        assert projection.out_features % width == 0, (projection.out_features, width)
        assert width <= MAX_WIDTH, width
        self.projection, self.norm = projection, np.ascontiguousarray(norm, np.float32)
        self.table = table  # the C struct points into it
        self.num_layers = projection.out_features // width
        self.dtype: Dtype = projection.out_dtype
        first_layer, row_layers = place or (0, self.num_layers)
        assert first_layer + self.num_layers <= row_layers, (place, self.num_layers)
        #: The C struct; it points into this object.
        self.arguments = PerLayerInputsArguments(
            table=EmbeddingArguments() if table is None else table.constants,
            projection=projection.arguments,
            norm=self.norm.ctypes.data,
            width=width,
            num_layers=self.num_layers,
            dtype=ELEMENT_NUMBERS[self.dtype],
            eps=eps,
            first_layer=first_layer,
            given_id=given_id,
            row_layers=row_layers,
        )
        self._run = library.function("per_layer", ctypes.POINTER(PerLayerStepArguments))

    @property
    def variant(self) -> str:
        """Name of the choices that fix the results' bits; part of the fingerprint."""
        return self.projection.variant

    def project(self, embedded: Floats) -> Numbers:
        """Return the projection [T, layers * width] of embeddings [T, hidden] float32."""
        return self.projection(rounded(embedded, self.dtype))

    def multiply(self, x: Numbers, ids: Ints, projected: Numbers, layer: int) -> Numbers:
        """Multiply x [T, width] by the layer's inputs of the tokens ids [T], in place. projected: of project()."""
        assert x.dtype == projected.dtype, (x.dtype, projected.dtype)
        assert x.flags.c_contiguous, x.strides
        ids = np.ascontiguousarray(ids)
        self._run(
            PerLayerStepArguments(
                inputs=ctypes.addressof(self.arguments),
                ids=ids.ctypes.data,
                projected=projected.ctypes.data,
                x=x.ctypes.data,
                num_rows=len(x),
                layer=layer,
            )
        )
        return x
