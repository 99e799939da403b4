"""The model's linear layers alone: products of the C kernel, of torch and of oneDNN on the same tensors.

Weights come from memory, as in an engine: each product has enough copies that few are still in the cache at their next
turn. A time is the shortest of many, because other work on the machine only adds to it. The memory bandwidth at that
time is a separate record: torch sums more bytes than the caches hold, and the median of many runs counts. For a GGUF
file with quantized matrices, the C kernel's products are also measured as stored: those of the first layer and the
head. Products in 8 bits use these matrices too, otherwise Q8_0. gb_s counts the weights' bytes as a kernel has them in
memory, and of_read is their share of the bandwidth.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from core.device import num_threads, start_cpu_kernels
from core.model_files.model_config import ModelConfig, read_model_config
from core.model_files.tensors.weights import load_weights
from core.models.operations.stored_matrix import StoredMatrix
from core.models.parts.weight_parts import WeightParts
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.version import NAME, VERSION
from kernels.cpu.decoder_parts import exceed_caches
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary
from kernels.cpu.packed_weights import PackedWeights
from kernels.elements import BFLOAT16, ELEMENT_TYPES, Dtype, Numbers, element_name
from kernels.torch.linear import best_product, plain_product, prepacked_product
from kernels.torch.tensors import DTYPES, to_array
from tools.lab.bench.experts import measure_experts

_HEAD_ROWS = 32  # at most, because the head computes one row for each request that samples

_COPIES_BYTES = 96 << 20  # three times a large cache
_MAX_COPIES = 256
_SECONDS = 0.3  # for each product
_READ_BYTES = 256 << 20
_READ_SECONDS = 1.0

Product = Callable[[Any], object]


class Packed(NamedTuple):
    """A weight as a kernel multiplies it."""

    product: Product
    num_bytes: int  # of the weight in memory


Weight = torch.Tensor | StoredMatrix
#: How a kernel packs a weight, and the weights that it uses as stored in a file, by product.
Ways: TypeAlias = tuple[Callable[[Any], Packed], Mapping[str, StoredMatrix]]


class Shape(NamedTuple):
    """A weight matrix of the model."""

    name: str
    out_features: int
    in_features: int
    layers: int  # number of layers with it


def measure_gemm(config: EngineConfig, rows: Sequence[int], rep: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each product, number of rows and kernel, and one for all linear layers together.

    Errors: ModelFileError, UnsupportedModelError; ConfigError without C kernels if the config demands them.
    """
    path = resolve_model(config.model)
    model_config = read_model_config(path)
    shapes = _shapes(model_config)
    dtype = ELEMENT_TYPES["float32" if config.dtype == "float32" else "bfloat16"]
    threads = num_threads(config)
    library = start_cpu_kernels(config)
    kernels = torch_kernels(dtype)
    if library is not None:
        kernels = _c_kernels(library, path, model_config, shapes, dtype) | kernels
    yield (read := _measure_read(library, threads, rep))
    for kernel, (pack, stored) in kernels.items():
        torch.set_num_threads(1 if kernel.startswith("c-") else threads)
        common: dict[str, Any] = {"engine": NAME, "version": VERSION, "workload": "gemm", "kernel": kernel}
        common |= {"dtype": element_name(dtype), "threads": threads, "rep": rep}
        totals, total_bytes = dict.fromkeys(rows, 0.0), 0
        for shape in shapes:
            weight = stored.get(shape.name) or _random(shape, dtype)
            copies = _copies(pack, weight)
            num_bytes = copies[0].num_bytes
            total_bytes += num_bytes * shape.layers
            for num_rows, seconds in _measure(shape, [each.product for each in copies], dtype, rows).items():
                totals[num_rows] += seconds * shape.layers
                one = [shape._replace(layers=1)]
                yield common | _record(shape.name, one, num_rows, seconds, num_bytes, read)
        for num_rows, seconds in totals.items():
            yield common | _record("all", shapes, num_rows, seconds, total_bytes, read)
    if library is not None:
        if model_config.experts is not None:
            common = {"engine": NAME, "version": VERSION, "workload": "gemm", "dtype": element_name(dtype)}
            for record in measure_experts(library, model_config, model_config.experts, dtype, rows):
                yield common | {"threads": threads, "rep": rep} | record
        library.stop_threads()


def torch_kernels(dtype: Dtype) -> dict[str, Ways]:
    """Return torch's ways to multiply, by name. oneDNN has none for bfloat16 on CPUs without AVX-512."""
    weight = torch.zeros(16, 16, dtype=DTYPES[dtype])
    is_prepacked = best_product(weight)[0] == "torch-prepacked"

    def prepacked(weight: torch.Tensor) -> Packed:
        return Packed(prepacked_product(weight), weight.nbytes)

    def plain(weight: torch.Tensor) -> Packed:
        return Packed(plain_product(weight), weight.nbytes)

    first: dict[str, Ways] = {"onednn-prepacked": (prepacked, {})} if is_prepacked else {}
    return first | {"linear": (plain, {})}


def _c_kernels(
    library: CpuLibrary, path: Path, config: ModelConfig, shapes: Sequence[Shape], dtype: Dtype
) -> dict[str, Ways]:
    """Return the C kernel's ways to multiply, by name, with the matrices of those that use a file's."""
    streams = exceed_caches(sum(_num_weights(shape) for shape in shapes) * dtype.itemsize)
    name = f"c-{library.variant}"
    kernels: dict[str, Ways] = {name: (lambda weight: _packed(library, to_array(weight), streams), {})}
    stored = _stored_matrices(path, config, library) if path.suffix == ".gguf" and dtype == BFLOAT16 else {}
    if stored and all(matrix.quantized(library) is not None for matrix in stored.values()):
        kernels[f"{name}-stored"] = (lambda matrix: _packed(library, matrix.quantized(library), streams), stored)
    kernels[f"{name}-int8"] = (lambda weight: _packed_in_8_bits(library, weight, dtype), stored)
    return kernels


def _stored_matrices(path: Path, config: ModelConfig, library: CpuLibrary) -> dict[str, StoredMatrix]:
    """Return the matrices of a file's head and first layer as stored, by product name."""
    parts = WeightParts(load_weights(path, config, BFLOAT16, library))
    embedding = parts.take_matrix("model.embed_tokens.weight")

    def of_layer(*names: str) -> StoredMatrix:
        return parts.take_matrix(*(f"model.layers.0.{name}_proj.weight" for name in names))

    return {
        "qkv": of_layer("self_attn.q", "self_attn.k", "self_attn.v"),
        "o": of_layer("self_attn.o"),
        "gate_up": of_layer("mlp.gate", "mlp.up"),
        "down": of_layer("mlp.down"),
        "head": embedding if config.tie_word_embeddings else parts.take_matrix("lm_head.weight"),
    }


def _packed(library: CpuLibrary, weight: Numbers | PackedWeights | None, streams: bool) -> Packed:
    """Return the weight in the engine's form.

    The model's size decides whether its weights bypass the caches, and whether they are compact.
    """
    assert weight is not None
    matrix = PackedMatrix(library, weight, is_kept=not streams)
    matrix.arguments.streams = streams
    return _of(matrix)


def _of(matrix: PackedMatrix) -> Packed:
    return Packed(lambda x: matrix(to_array(x)), matrix.packed.nbytes)


def _packed_in_8_bits(library: CpuLibrary, weight: Weight, dtype: Dtype) -> Packed:
    """Return a product in 8 bits with the matrix as stored, or as `--quantization int8` quantizes it."""
    matrix = weight if isinstance(weight, StoredMatrix) else StoredMatrix.of(to_array(weight))
    quantized = matrix.quantized(library, in_8_bits=True)
    assert quantized is not None, matrix.shape
    return _of(PackedMatrix(library, quantized, dtype=dtype))


def _num_weights(shape: Shape) -> int:
    return shape.out_features * shape.in_features * shape.layers


def _random(shape: Shape, dtype: Dtype) -> torch.Tensor:
    return torch.randn(shape.out_features, shape.in_features, dtype=DTYPES[dtype])


def _measure_read(library: CpuLibrary | None, threads: int, rep: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    room = np.empty(_READ_BYTES, np.uint8) if library is None else library.memory.allocate(_READ_BYTES)
    room.fill(0)
    numbers = torch.from_numpy(room).view(torch.float32)
    times: list[float] = []
    end = time.perf_counter() + _READ_SECONDS
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    record = {"engine": NAME, "version": VERSION, "workload": "gemm", "kernel": "read", "threads": threads}
    return record | {"rep": rep, "us": round(seconds * 1e6, 2), "gb_s": round(_READ_BYTES / seconds / 1e9, 2)}


def _shapes(config: ModelConfig) -> list[Shape]:
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    first = heads + 2 * kv_heads
    if (latent := config.latent) is not None:
        queries = config.num_attention_heads * (latent.plain_dim + latent.rotated_dim)
        first = (latent.query_dim or queries) + latent.latent_dim + latent.rotated_dim
        heads = config.num_attention_heads * latent.value_dim
    hidden, intermediate, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    dense = layers if config.experts is None else len(config.experts.dense_layers)
    shapes = [
        Shape("qkv", first, hidden, layers),
        Shape("o", hidden, heads, layers),
        Shape("gate_up", 2 * intermediate, hidden, dense),
        Shape("down", hidden, intermediate, dense),
        Shape("head", config.vocab_size, hidden, 1),
    ]
    return [shape for shape in shapes if shape.layers]


@torch.inference_mode()
def _copies(pack: Callable[[Any], Packed], weight: Weight) -> list[Packed]:
    """Return the packed weight as often as is needed for the caches not to keep the copies."""
    first = pack(weight)
    count = min(_MAX_COPIES, math.ceil(_COPIES_BYTES / first.num_bytes))
    return [first, *(pack(weight) for _ in range(count - 1))]


@torch.inference_mode()
def _measure(shape: Shape, products: Sequence[Product], dtype: Dtype, rows: Sequence[int]) -> dict[int, float]:
    """Return the seconds of one product for each number of rows."""
    best: dict[int, float] = {}
    for num_rows in rows:
        x = torch.randn(_rows(shape.name, num_rows), shape.in_features, dtype=DTYPES[dtype])
        times: list[float] = []
        end = time.perf_counter() + _SECONDS
        while not times or time.perf_counter() < end:
            for product in products:
                begin = time.perf_counter()
                product(x)
                times.append(time.perf_counter() - begin)
        best[num_rows] = min(times)
    return best


def _rows(name: str, num_rows: int) -> int:
    return min(num_rows, _HEAD_ROWS) if name == "head" else num_rows


def _record(
    name: str, shapes: Sequence[Shape], num_rows: int, seconds: float, num_bytes: int, read: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one record. num_bytes: of the weights in memory. read: the record of memory's bandwidth."""
    num_products = sum(_num_weights(shape) * _rows(shape.name, num_rows) for shape in shapes)
    return {
        "product": name,
        "shape": [shapes[0].out_features, shapes[0].in_features] if len(shapes) == 1 else None,
        "rows": num_rows,
        "us": round(seconds * 1e6, 2),
        "gflop_s": round(2 * num_products / seconds / 1e9, 1),
        "gb_s": round(num_bytes / seconds / 1e9, 2),
        "of_read": round(num_bytes / seconds / 1e9 / read["gb_s"], 3),
    }
