"""The C kernels except the matrix product, each next to torch's own operation on the same tensors.

Fractions are of what the C matrix product reaches here: memory's bandwidth with one row and a matrix from memory, the
peak with many rows and a matrix in cache. A time is the shortest of many, because other work on the machine only adds
to it. Tensors that fit into a cache are in it, so bandwidths can exceed memory's.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from core.device import num_threads, start_cpu_kernels
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.tables.rounding import ceil_div
from ipc.version import NAME, VERSION
from kernels.cpu.attention import CpuAttention
from kernels.cpu.attention_plan import AttentionPlanner
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.cpu.norm import CpuNorm
from kernels.cpu.rope import CpuRope, RotaryTable
from kernels.cpu.sampling import CpuSampler
from kernels.elements import ELEMENT_TYPES, Dtype, element_name
from kernels.rotary import rotary_frequencies
from kernels.torch.rope import rotary_tables, rotate
from kernels.torch.tensors import DTYPES, to_array, to_tensor

_SECONDS = 0.3  # for each operation

#: The shapes of SmolLM2-135M.
_HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN, _VOCAB = 9, 3, 64, 576, 49152

#: (name, requests, context tokens of each, how many of these are computed)
_BATCHES = (("prefill", 1, 2000, 2000), ("decode", 1, 2000, 1), ("decode", 8, 512, 1), ("decode", 32, 2000, 1))


class Case(NamedTuple):
    """One kernel on one shape, and torch's operation for the same work."""

    kernel: str
    shape: str
    run: Callable[[], object]
    torch_run: Callable[[], object]
    num_bytes: float  # read and written at least once
    num_flops: float


@torch.inference_mode()
def measure_kernels(config: EngineConfig, rep: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each kernel and shape. Errors: ConfigError without C kernels."""
    library = start_cpu_kernels(config)
    if library is None:
        raise ConfigError("bench kernels measures the C kernels, which are not available here; see cpu_kernels")
    threads = num_threads(config)
    dtype = ELEMENT_TYPES["float32" if config.dtype == "float32" else "bfloat16"]
    bandwidth, peak = _limits(library, dtype)
    common: dict[str, Any] = {
        "engine": NAME,
        "version": VERSION,
        "workload": "kernels",
        "variant": library.variant,
    }
    common |= {"dtype": element_name(dtype), "threads": threads, "rep": rep}
    for case in _cases(library, dtype):
        seconds = _least(case.run)
        torch.set_num_threads(threads)
        torch_seconds = _least(case.torch_run)
        torch.set_num_threads(1)  # otherwise torch's threads would spin while the kernels' run
        yield common | {
            "kernel": case.kernel,
            "shape": case.shape,
            "us": round(seconds * 1e6, 2),
            "torch_us": round(torch_seconds * 1e6, 2),
            "gb_s": round(case.num_bytes / seconds / 1e9, 2),
            "gflop_s": round(case.num_flops / seconds / 1e9, 1),
            "of_bandwidth": round(case.num_bytes / seconds / bandwidth, 3),
            "of_peak": round(case.num_flops / seconds / peak, 3),
        }
    library.stop_threads()


def _least(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest run."""
    run()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def _limits(library: CpuLibrary, dtype: Dtype) -> tuple[float, float]:
    """Return (bytes/s from memory, operations/s)."""
    large, small = np.zeros((1 << 16, 1024), dtype), np.zeros((512, 512), dtype)
    x, row = np.zeros((512, 512), dtype), np.zeros((1, 1024), dtype)
    matrix, square = PackedMatrix(library, large), PackedMatrix(library, small)
    return large.nbytes / _least(lambda: matrix(row)), 2 * 512**3 / _least(lambda: square(x))


def _cases(library: CpuLibrary, dtype: Dtype) -> Iterator[Case]:
    for name, requests, length, count in _BATCHES:
        yield _attention(library, dtype, name, requests, length, count)
    for rows in (1, 32, 512):
        yield from _row_cases(library, dtype, rows)
    for rows in (1, 32):
        yield from _sampler_cases(library, rows)


def _attention(library: CpuLibrary, dtype: Dtype, name: str, requests: int, length: int, count: int) -> Case:
    blocks = ceil_div(length, 16)
    cache = CpuKVCache(1, requests * blocks + 1, 16, _KV_HEADS, head_dim=_HEAD_DIM, dtype=dtype)
    to_tensor(cache.layers[0]).normal_()
    tables = np.random.default_rng(0).permutation(requests * blocks).reshape(requests, blocks) + 1
    planner = AttentionPlanner(library, _HEADS, _KV_HEADS)
    plan = planner(np.full(requests, count), np.full(requests, length), tables, cache.block_size)
    q = to_array(torch.randn(requests * count, _HEADS, _HEAD_DIM).to(DTYPES[dtype]))
    attention = CpuAttention(library)
    theirs = torch.randn(requests, _HEADS, count, _HEAD_DIM).to(DTYPES[dtype])
    keys, values = torch.randn(2, requests, _KV_HEADS, length, _HEAD_DIM).to(DTYPES[dtype])
    group = _HEADS // _KV_HEADS
    if count == 1:  # torch is fastest with the query heads of a KV head as rows of one head
        theirs = theirs.view(requests, _KV_HEADS, group, _HEAD_DIM)
    else:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    seen = requests * (count * (length - count) + count * (count + 1) / 2)
    return Case(
        f"attention {name}",
        f"{requests}x{length}",
        lambda: attention(q, cache, 0, plan, 0.125),
        lambda: scaled_dot_product_attention(theirs, keys, values, is_causal=count > 1),
        2 * requests * length * _KV_HEADS * _HEAD_DIM * dtype.itemsize,
        4 * seen * _HEADS * _HEAD_DIM,
    )


def _row_cases(library: CpuLibrary, dtype: Dtype, rows: int) -> Iterator[Case]:
    to = DTYPES[dtype]
    hidden, x, weight = torch.randn(rows, _HIDDEN), torch.randn(rows, _HIDDEN).to(to), torch.ones(_HIDDEN)
    norm, size = CpuNorm(library, to_array(weight), 1e-5, dtype), dtype.itemsize
    added = partial(norm.after, to_array(hidden), to_array(x))
    yield Case(
        "norm after addition",
        f"{rows}x{_HIDDEN}",
        added,
        lambda: rms_norm(hidden.add_(x), (_HIDDEN,), weight, 1e-5).to(to),
        rows * _HIDDEN * (8 + 2 * size),
        rows * _HIDDEN * 5,
    )
    width = (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
    qkv, slots = torch.randn(rows, width).to(to), torch.arange(16, 16 + rows)
    cache, rope = (
        CpuKVCache(1, rows // 16 + 2, 16, _KV_HEADS, head_dim=_HEAD_DIM, dtype=dtype),
        CpuRope(library, _HEADS),
    )
    positions, table = torch.arange(rows), RotaryTable(rotary_frequencies(_HEAD_DIM, 1e4))
    table.reach(rows)
    cos, sin = rotary_tables(positions, to_tensor(rotary_frequencies(_HEAD_DIM, 1e4)))
    heads, plain = qkv.view(rows, -1, _HEAD_DIM)[:, : _HEADS + _KV_HEADS], torch.empty(rows + 16, width, dtype=to)
    ours_rope = partial(rope, to_array(qkv), table, to_array(positions), cache, 0, to_array(slots))

    def theirs_rope() -> None:
        rotated = rotate(heads, cos, sin).to(to).flatten(1)
        plain[:, : rotated.shape[1]].index_copy_(0, slots, rotated)

    yield Case(
        "rope and cache write",
        f"{rows}x{width}",
        ours_rope,
        theirs_rope,
        rows * (2 * width * size + 2 * _HEAD_DIM * 4),
        rows * (_HEADS + _KV_HEADS) * _HEAD_DIM * 3,
    )


def _sampler_cases(library: CpuLibrary, rows: int) -> Iterator[Case]:
    logits = torch.randn(rows, _VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    sampler, none, zero = CpuSampler(library), np.ones(rows), np.zeros(rows)
    for name, temperature, top_k, top_p in (
        ("greedy", 0.0, 0, 1.0),
        ("plain", 1.0, 0, 1.0),
        ("top_k 50", 1.0, 50, 1.0),
        ("top_p 0.9", 1.0, 0, 0.9),
    ):
        columns = (none * temperature, none * top_k, none * top_p, zero, np.arange(rows), zero, zero)
        yield Case(
            f"sampler {name}",
            f"{rows}x{_VOCAB}",
            partial(sampler, to_array(logits), columns),
            partial(_sample, logits, temperature, top_k, top_p),
            rows * _VOCAB * 4,
            rows * _VOCAB,
        )


def _sample(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Draw tokens with the torch operations that any such draw needs."""
    if temperature == 0:
        return logits.argmax(-1)
    values = logits.topk(top_k).values if top_k else logits.sort(-1).values if top_p < 1 else logits
    return torch.multinomial(values.softmax(-1), 1)
