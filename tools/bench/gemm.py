"""The model's linear layers alone: products of the C kernel, of torch and of oneDNN on the same tensors.

Weights come from memory, as in an engine: each product has so many copies that few are still in the cache at their next
turn. A time is the least of many, because other work on the machine only adds to it. The bandwidth of memory meanwhile
is a record of its own: torch adds up more bytes than the caches hold, the median of many runs.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from core.device import num_threads, start_cpu_kernels
from core.model_files.model_config import ModelConfig, read_model_config
from ipc.config import EngineConfig
from ipc.files.model_files import resolve_model
from ipc.version import NAME, VERSION
from kernels.cpu.decoder import exceed_caches
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary
from kernels.elements import ELEMENT_TYPES, Dtype, Numbers, element_name
from kernels.torch.linear import plain_product, prepacked_product
from kernels.torch.tensors import DTYPES, to_array

_HEAD_ROWS = 32  # at most: the head computes one row for each request that samples

_COPIES_BYTES = 96 << 20  # three times a large cache
_MAX_COPIES = 64
_SECONDS = 0.3  # for each product
_READ_BYTES = 256 << 20
_READ_SECONDS = 1.0

Product = Callable[[Any], object]


class Shape(NamedTuple):
    """A weight matrix of the model."""

    name: str
    out_features: int
    in_features: int
    layers: int  # number of layers that have it


def measure_gemm(config: EngineConfig, rows: Sequence[int], rep: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each product, number of rows and kernel, and one for all linear layers together.

    Errors: ModelFileError, UnsupportedModelError; ConfigError without C kernels if the config demands them.
    """
    shapes = _shapes(read_model_config(resolve_model(config.model)))
    dtype = ELEMENT_TYPES["float32" if config.dtype == "float32" else "bfloat16"]
    threads = num_threads(config)
    library = start_cpu_kernels(config)
    kernels: dict[str, Callable[[torch.Tensor], Product]] = {
        "onednn-prepacked": prepacked_product,
        "linear": plain_product,
    }
    if library is not None:
        made, streams = library, exceed_caches(sum(_num_weights(shape) for shape in shapes) * dtype.itemsize)
        kernels = {f"c-{library.variant}": lambda weight: _packed(made, to_array(weight), streams), **kernels}
    yield _measure_read(library, threads, rep)
    for kernel, pack in kernels.items():
        torch.set_num_threads(1 if kernel.startswith("c-") else threads)
        common: dict[str, Any] = {"engine": NAME, "version": VERSION, "workload": "gemm", "kernel": kernel}
        common |= {"dtype": element_name(dtype), "threads": threads, "rep": rep}
        totals = dict.fromkeys(rows, 0.0)
        for shape in shapes:
            for num_rows, seconds in _measure(shape, pack, dtype, rows).items():
                totals[num_rows] += seconds * shape.layers
                yield common | _record(shape.name, [shape._replace(layers=1)], num_rows, seconds, dtype)
        for num_rows, seconds in totals.items():
            yield common | _record("all", shapes, num_rows, seconds, dtype)
    if library is not None:
        library.stop_threads()


def _packed(library: CpuLibrary, weight: Numbers, streams: bool) -> Product:
    """Return the weight as the engine has it.

    The model's size decides whether its weights are read past the caches, and whether they are compact.
    """
    matrix = PackedMatrix(library, weight, is_kept=not streams)
    matrix.arguments.streams = streams
    return lambda x: matrix(to_array(x))


def _num_weights(shape: Shape) -> int:
    return shape.out_features * shape.in_features * shape.layers


def _measure_read(library: CpuLibrary | None, threads: int, rep: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    room = np.empty(_READ_BYTES, np.uint8) if library is None else library.allocate(_READ_BYTES)
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
    hidden, intermediate, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    return [
        Shape("qkv", heads + 2 * kv_heads, hidden, layers),
        Shape("o", hidden, heads, layers),
        Shape("gate_up", 2 * intermediate, hidden, layers),
        Shape("down", hidden, intermediate, layers),
        Shape("head", config.vocab_size, hidden, 1),
    ]


@torch.inference_mode()
def _measure(
    shape: Shape, pack: Callable[[torch.Tensor], Product], dtype: Dtype, rows: Sequence[int]
) -> dict[int, float]:
    """Return the seconds of one product for each number of rows."""
    weight = torch.randn(shape.out_features, shape.in_features, dtype=DTYPES[dtype])
    products = [pack(weight) for _ in range(min(_MAX_COPIES, math.ceil(_COPIES_BYTES / weight.nbytes)))]
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


def _record(name: str, shapes: Sequence[Shape], num_rows: int, seconds: float, dtype: Dtype) -> dict[str, Any]:
    """Return one record.

    Bytes are the weights' in this dtype, read once; where weights are compact, three quarters of that are read.
    """
    num_weights = sum(map(_num_weights, shapes))
    num_products = sum(_num_weights(shape) * _rows(shape.name, num_rows) for shape in shapes)
    return {
        "product": name,
        "shape": [shapes[0].out_features, shapes[0].in_features] if len(shapes) == 1 else None,
        "rows": num_rows,
        "us": round(seconds * 1e6, 2),
        "gflop_s": round(2 * num_products / seconds / 1e9, 1),
        "gb_s": round(num_weights * dtype.itemsize / seconds / 1e9, 2),
    }
