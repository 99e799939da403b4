"""cpu_decoder: the C decoder of a model, which runs all layers of a step in one call."""

from collections.abc import Sequence

from core.models.config import ModelConfig
from core.models.cpu_operations import CpuAttend, CpuOperations
from core.models.layer import Layer
from core.models.operations import Norm, Operations, Product
from core.models.tensor import Operation
from core.models.unchanged import unchanged
from kernels.cpu.decoder import CpuDecoder, LayerParts
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.norm import CpuNorm


def cpu_decoder(
    config: ModelConfig,
    operations: Operations,
    layers: Sequence[Layer],
    embedding: Operation,
    norm: Norm,
    float_norm: Norm,
    head: Product,
) -> CpuDecoder | None:
    """Return the decoder made of these parts of a model; None if its operations are not the C kernels'."""
    if not isinstance(operations, CpuOperations):
        return None
    assert isinstance(embedding, CpuEmbedding), type(embedding)
    return CpuDecoder(
        operations.library,
        [_parts(layer) for layer in layers],
        embedding,
        _norm(norm),
        _norm(float_norm),
        _matrix(head),
        operations.tables,
        num_heads=config.num_attention_heads,
    )


def _parts(layer: Layer) -> LayerParts:
    assert isinstance(layer.attention, CpuAttend), type(layer.attention)
    return LayerParts(
        input_norm=_norm(layer.input_norm),
        qkv=_matrix(layer.qkv),
        head_norms=layer.attention.rope.head_norms,
        scale=layer.attention.scale,
        o=_matrix(layer.o),
        attention_out_norm=None if layer.attention_out is unchanged else _norm(layer.attention_out),
        mlp_norm=_norm(layer.mlp_norm),
        gate_up=_matrix(layer.gate_up),
        down=_matrix(layer.down),
        mlp_out_norm=None if layer.mlp_out is unchanged else _norm(layer.mlp_out),
        kind=layer.kind,
    )


def _norm(norm: Norm | Operation) -> CpuNorm:
    assert isinstance(norm, CpuNorm), type(norm)
    return norm


def _matrix(product: Product) -> PackedMatrix:
    assert isinstance(product, PackedMatrix), type(product)
    return product
