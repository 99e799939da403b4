"""Makes tests/data/packed_matrices.safetensors: matrices as other libraries pack them, and their numbers there.

    pip install compressed-tensors==0.20.1 bitsandbytes==0.50.2 torchao==0.18.0
    python -m tests.core.model_files.make_packed_golden

A tensor is named CASE/KIND, as in a model folder after the matrix's name, and CASE/expected.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPE = (64, 64)
GOLDEN = Path(__file__).parents[2] / "data" / "packed_matrices.safetensors"
Tensors = dict[str, torch.Tensor]


def weights(seed: int, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    """Numbers as a model has them, and some that are larger."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator) * 0.05
    numbers[3, :5] *= 30
    return numbers.to(dtype)


def compressed(format_name: str, bits: int, group: int, seed: int) -> Tensors:
    """A matrix of compressed-tensors in a format of floats, with scales as its observers choose them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    numbers = weights(seed)
    strategy = "tensor_group" if group == 16 else "group"
    args = QuantizationArgs(num_bits=bits, type="float", group_size=group, strategy=strategy, symmetric=True)
    if bits == 8:
        args = args.model_copy(update={"scale_dtype": torch.uint8})
    largest = numbers.float().reshape(len(numbers), -1, group).abs().amax(2)
    tensors = {"weight": numbers}
    if group == 16:
        tensors["weight_global_scale"] = (448 * 6 / largest.max()).reshape(1)
        scales = (largest / 6 * tensors["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    else:
        scales = torch.exp2(torch.ceil(torch.log2(largest / (6 if bits == 4 else 448))))
    tensors["weight_scale"] = scales
    compressor = BaseCompressor.get_value_from_registry(format_name)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    packed = compressor.compress(tensors, scheme)
    return packed | {"expected": compressor.decompress(packed, scheme)["weight"]}


def four_bits(kind: str, seed: int, *, nested: bool, **options: object) -> Tensors:
    """A matrix of bitsandbytes with codes of four bits, dequantized to float32."""
    from bitsandbytes import functional

    shape = options.pop("shape", SHAPE)
    numbers = weights(seed, torch.float32, shape)  # type: ignore[arg-type]
    packed, state = functional.quantize_4bit(numbers, quant_type=kind, compress_statistics=nested, **options)
    tensors = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return tensors | {"weight": packed, "expected": functional.dequantize_4bit(packed, state)}


def llm_int8(seed: int) -> Tensors:
    """A matrix of bitsandbytes with codes of eight bits."""
    from bitsandbytes import functional

    codes, largest, _ = functional.int8_vectorwise_quant(weights(seed, torch.float16))
    expected = functional.int8_vectorwise_dequant(codes, largest)
    format_of_rows = torch.tensor(0, dtype=torch.uint8)
    return {"weight": codes, "SCB": largest, "weight_format": format_of_rows, "expected": expected}


def flattened(matrix: torch.Tensor, expected: torch.Tensor) -> Tensors:
    """A matrix of torchao as it and transformers write it."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensors, metadata = flatten_tensor_state_dict({"x.weight": matrix})
    assert json.loads(metadata["x.weight"])["_type"] == type(matrix).__name__
    return {name.removeprefix("x."): tensor for name, tensor in tensors.items()} | {"expected": expected}


def torchao_quantized(config: object, seed: int) -> Tensors:
    """A matrix of torchao's type for a config."""
    from torchao.quantization import quantize_

    layer = torch.nn.Linear(*reversed(SHAPE), bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weights(seed), requires_grad=False)
    quantize_(layer, config)
    return flattened(layer.weight.data, layer.weight.dequantize())


def torchao_int4(seed: int) -> Tensors:
    """An Int4Tensor; torchao needs a GPU to make one. Its numbers are those of the formula that its kernels share."""
    from torchao.quantization import Int4Tensor
    from torchao.quantization.quant_primitives import _dequantize_affine_tinygemm

    numbers, group = weights(seed).float().reshape(SHAPE[0], -1, 32), 32
    least, most = numbers.amin(2), numbers.amax(2)
    scale = ((most - least).clamp(min=1e-6) / 15).to(torch.bfloat16)
    zero = (least + scale.float() * 8).to(torch.bfloat16)
    codes = ((numbers - least[..., None]) / scale.float()[..., None]).round().clamp(0, 15).to(torch.int8).reshape(SHAPE)
    signed = codes - 8
    packed = (signed[:, ::2] & 15) | (signed[:, 1::2] << 4)
    matrix = Int4Tensor(packed, scale.T.contiguous(), zero.T.contiguous(), [1, group], torch.Size(SHAPE))
    wide = scale.float(), zero.float()
    expected = _dequantize_affine_tinygemm(
        codes.to(torch.int32), (1, group), *wide, torch.int32, 0, 15, output_dtype=torch.float32
    )
    return flattened(matrix, expected)


def make() -> dict[str, Tensors]:
    """Return all cases."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    return {
        "compressed-tensors-nvfp4": compressed("nvfp4-pack-quantized", 4, 16, 1),
        "compressed-tensors-mxfp4": compressed("mxfp4-pack-quantized", 4, 32, 2),
        "compressed-tensors-mxfp8": compressed("mxfp8-quantized", 8, 32, 3),
        "bitsandbytes-nf4": four_bits("nf4", 4, nested=False, blocksize=64),
        "bitsandbytes-nf4-nested": four_bits("nf4", 5, nested=True, blocksize=64),
        "bitsandbytes-nf4-in-bfloat16": four_bits("nf4", 6, nested=True, quant_storage=torch.bfloat16),
        "bitsandbytes-fp4-128": four_bits("fp4", 7, nested=True, blocksize=128),
        "bitsandbytes-nf4-odd": four_bits("nf4", 8, nested=True, blocksize=64, shape=(14, 36)),
        "bitsandbytes-int8": llm_int8(9),
        "torchao-int8": torchao_quantized(Int8WeightOnlyConfig(version=2), 10),
        "torchao-intx": torchao_quantized(IntxWeightOnlyConfig(torch.int4, PerGroup(32)), 11),
        "torchao-float8": torchao_quantized(Float8WeightOnlyConfig(version=2), 12),
        "torchao-int4": torchao_int4(13),
    }


if __name__ == "__main__":
    cases = {f"{case}/{kind}": tensor for case, tensors in make().items() for kind, tensor in tensors.items()}
    save_file({name: tensor.detach().contiguous() for name, tensor in cases.items()}, GOLDEN)
