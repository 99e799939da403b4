"""The Triton kernels on a GPU, each next to torch's own on the same tensors: time, bytes, operations.

Fractions are of this GPU's measured limits: bytes of a copy within its memory, operations of a square product. A time
is the median of runs with a cold L2 cache (triton.testing.do_bench).
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from core.device import cuda_device
from ipc.options.config import EngineConfig
from ipc.tables.rounding import ceil_div
from ipc.version import NAME, VERSION
from kernels.torch.packed_rows import PackedRows, pack_blocks, quantize_rows
from kernels.torch.tensors import element_type
from tools.lab.bench.gpu.gpu_case import Case
from tools.lab.bench.gpu.gpu_experts import QWEN3_30B, ExpertShape, captured, expert_cases


class Shapes(NamedTuple):
    """The shapes of a model, and the batches to measure. The defaults are those of Llama 3 8B, with other experts."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 14_336
    vocab: int = 128_256
    decode: tuple[tuple[int, int], ...] = ((1, 2048), (8, 2048), (64, 2048), (256, 1024))  # requests, context of each
    prefill: tuple[tuple[int, int], ...] = ((1, 2048), (4, 512), (1, 8192))  # requests, tokens of each
    rows: tuple[int, ...] = (1, 64, 2048)
    experts: ExpertShape = QWEN3_30B
    copied: int = 1 << 30  # bytes
    square: int = 8192

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Sizes of a layer's result and input."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


LLAMA_8B = Shapes()


@torch.inference_mode()
def measure_gpu_kernels(config: EngineConfig, rep: int, shapes: Shapes = LLAMA_8B) -> Iterator[dict[str, Any]]:
    """Yield a record for each kernel and shape. Errors: ConfigError without a GPU."""
    device = cuda_device()
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    source = torch.empty(shapes.copied // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    square = torch.zeros(shapes.square, shapes.square, dtype=dtype, device=device)
    bandwidth = shapes.copied / seconds(lambda: target.copy_(source))
    peak = 2 * shapes.square**3 / seconds(lambda: square @ square)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    common: dict[str, Any] = {
        "engine": NAME,
        "version": VERSION,
        "workload": "kernels",
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "copy_gb_s": round(bandwidth / 1e9, 1),
        "product_tflop_s": round(peak / 1e12, 3),
        "rep": rep,
    }
    for case in _cases(shapes, device, dtype):
        ours, theirs = seconds(case.run), seconds(case.torch_run)
        yield common | {
            "kernel": case.kernel,
            "shape": case.shape,
            "us": round(ours * 1e6, 2),
            "torch": case.theirs,
            "torch_us": round(theirs * 1e6, 2),
            "gb_s": round(case.num_bytes / ours / 1e9, 2),
            "gflop_s": round(case.num_flops / ours / 1e9, 1),
            "of_copy": round(case.num_bytes / ours / bandwidth, 3),
            "of_product": round(case.num_flops / ours / peak, 3),
        }


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of the median run on the GPU."""
    from triton.testing import do_bench

    result: float = do_bench(run, return_mode="median")
    return result / 1e3


def _cases(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for requests, length in shapes.decode:
        yield _attention(shapes, device, dtype, requests, length, 1)
    for requests, length in shapes.prefill:
        yield _attention(shapes, device, dtype, requests, length, length)
    for rows in shapes.rows:
        yield from _row_cases(shapes, device, dtype, rows)
    yield from expert_cases(shapes.experts, device, dtype)
    yield from quantized_products(shapes.products, device, dtype)
    for requests, _ in shapes.decode:
        yield from _sampler_cases(shapes, device, requests)


def _attention(
    shapes: Shapes, device: torch.device, dtype: torch.dtype, requests: int, length: int, count: int
) -> Case:
    from kernels.triton.attention_work import triton_work
    from kernels.triton.decode_attention import decode_attention
    from kernels.triton.kv_cache import TritonKVCache
    from kernels.triton.prefill_attention import prefill_attention

    heads, kv_heads, width = shapes.heads, shapes.kv_heads, shapes.head_dim
    blocks = ceil_div(length, 16)
    cache = TritonKVCache(
        1, requests * blocks + 1, 16, kv_heads, head_dim=width, dtype=element_type(dtype), device=device
    )
    cache.layers[0].normal_()
    tables = np.random.default_rng(0).permutation(requests * blocks).reshape(requests, blocks) + 1
    work = triton_work(np.full(requests, count), np.full(requests, length), tables, heads // kv_heads, device)
    q = torch.randn(requests * count, heads, width, device=device).to(dtype)
    out, scale = torch.empty_like(q), width**-0.5
    attend = decode_attention if count == 1 else prefill_attention
    seen = requests * (count * (length - count) + count * (count + 1) / 2)
    name, theirs = _torch_attention(shapes, device, dtype, requests, length, q)
    return Case(
        f"attention {'decode' if count == 1 else 'prefill'}",
        f"{requests}x{length}",
        partial(attend, q, cache, 0, work, scale, out),
        name,
        theirs,
        (2 * requests * length * kv_heads + 2 * requests * count * heads) * width * dtype.itemsize,
        4 * seen * heads * width,
    )


def _torch_attention(
    shapes: Shapes, device: torch.device, dtype: torch.dtype, requests: int, length: int, q: torch.Tensor
) -> tuple[str, Callable[[], object]]:
    """Return (name, call) of torch's fastest attention.

    It is flash attention over packed requests if dtype and device support it, otherwise scaled_dot_product_attention.
    """
    count = len(q) // requests
    keys, values = torch.randn(2, requests * length, shapes.kv_heads, shapes.head_dim, device=device).to(dtype)
    if device.type == "cuda" and dtype != torch.float32:
        starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
        return "varlen_attn", partial(
            varlen_attn,
            q,
            keys,
            values,
            starts * count,
            starts * length,
            count,
            length,
            window_size=(-1, 0),
            **gqa_option(varlen_attn),
        )
    split = q.view(requests, count, shapes.heads, -1).transpose(1, 2)
    keys, values = (x.view(requests, length, shapes.kv_heads, -1).transpose(1, 2) for x in (keys, values))
    attend = partial(scaled_dot_product_attention, split, keys, values, is_causal=count > 1, enable_gqa=True)
    return "scaled_dot_product_attention", attend


def gqa_option(attention: Callable[..., object]) -> dict[str, Any]:
    """Return the argument that allows fewer KV heads than query heads.

    torch 2.11 always allows it; later versions need the argument.
    """
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(attention).parameters else {}


def _row_cases(shapes: Shapes, device: torch.device, dtype: torch.dtype, rows: int) -> Iterator[Case]:
    from kernels.triton.gated_activation import silu_mul
    from kernels.triton.kv_cache import TritonKVCache
    from kernels.triton.norm import TritonNorm
    from kernels.triton.rope import TritonRope

    size, hidden_size, width = dtype.itemsize, shapes.hidden, shapes.intermediate
    hidden = torch.zeros(rows, hidden_size, device=device)
    x, weight = torch.randn(rows, hidden_size, device=device).to(dtype), torch.ones(hidden_size, device=device)
    norm = TritonNorm(weight, 1e-5, dtype)
    yield Case(
        "norm after addition",
        f"{rows}x{hidden_size}",
        lambda: norm.after(hidden, x),
        "add_, rms_norm, to",
        lambda: rms_norm(hidden.add_(x), (hidden_size,), weight, 1e-5).to(dtype),
        rows * hidden_size * (8 + 2 * size),
        rows * hidden_size * 5,
    )
    gate_up = torch.randn(rows, 2 * width, device=device).to(dtype)
    gate, up = gate_up.chunk(2, -1)
    shape = f"{rows}x{width}"
    yield Case(
        "silu * up", shape, partial(silu_mul, gate_up), "silu, *", lambda: silu(gate) * up,
        rows * width * 3 * size, rows * width * 15,
    )  # fmt: skip
    head_dim, num_rotated = shapes.head_dim, shapes.heads + shapes.kv_heads
    qkv_width = (num_rotated + shapes.kv_heads) * head_dim
    qkv, slots = torch.randn(rows, qkv_width, device=device).to(dtype), torch.arange(16, 16 + rows, device=device)
    cache = TritonKVCache(
        1, rows // 16 + 2, 16, shapes.kv_heads, head_dim=head_dim, dtype=element_type(dtype), device=device
    )
    cos, sin = torch.randn(2, rows, 1, head_dim, device=device)
    rotated, rope = qkv.view(rows, -1, head_dim)[:, :num_rotated], TritonRope(shapes.heads)
    yield Case(
        "rope and cache write",
        f"{rows}x{qkv_width}",
        lambda: rope(qkv, cos, sin, cache, 0, slots),
        "roll, *, +",
        lambda: (rotated * cos + rotated.roll(head_dim // 2, -1) * sin).to(dtype),
        rows * (2 * qkv_width * size + 2 * head_dim * 4),
        rows * num_rotated * head_dim * 3,
    )


def _sampler_cases(shapes: Shapes, device: torch.device, rows: int) -> Iterator[Case]:
    from kernels.triton.sampling import kinds_of, pack_columns, sample_tokens

    flat = torch.randn(rows, shapes.vocab, device=device) * 3
    peaked = flat.clone()
    peaked[:, :50] += 12  # nearly all the weight
    one, seeds = np.ones(rows), np.arange(rows, dtype=np.uint64)
    for name, logits, temperature, top_k, top_p, theirs in (
        ("greedy", flat, 0.0, 0, 1.0, "argmax"),
        ("plain", flat, 1.0, 0, 1.0, "softmax, multinomial"),
        ("top_k 50", flat, 1.0, 50, 1.0, "topk, softmax, multinomial"),
        ("top_p 0.9 of 50 tokens", peaked, 1.0, 0, 0.9, "sort, softmax, multinomial"),
        ("top_p 0.9 of thousands", flat, 1.0, 0, 0.9, "sort, softmax, multinomial"),
    ):
        packed = pack_columns(
            temperature=one * temperature,
            top_k=one * top_k,
            top_p=one * top_p,
            min_p=one * 0,
            seed=seeds,
            position=one * 0,
            choice=one * 0,
        )
        words = torch.from_numpy(packed).to(device)
        yield Case(
            f"sampler {name}",
            f"{rows}x{shapes.vocab}",
            partial(sample_tokens, logits, words, kinds_of(packed)),
            theirs,
            partial(_torch_sample, logits, temperature, top_k, top_p),
            rows * shapes.vocab * 4,
            rows * shapes.vocab,
        )


def _torch_sample(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Draw tokens with the torch operations that any such draw needs."""
    if temperature == 0:
        return logits.argmax(-1)
    values = logits.topk(top_k).values if top_k else logits.sort(-1).values if top_p < 1 else logits
    return torch.multinomial(values.softmax(-1), 1)


# The products of weights that stay quantized on a GPU, each next to torch's product of the same weights in bfloat16.


#: Rows of x.
ROWS = (1, 8, 64, 512)


def quantized_products(shapes: dict[str, tuple[int, int]], device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield a case for each shape, name -> (out, in), each form and each number of rows."""
    from kernels.triton.packed_linear import PackedLinear

    for name, (columns, depth) in shapes.items():
        weight = torch.randn(columns, depth, device=device, dtype=dtype) * 0.02
        for form, packed in _forms(weight):
            product = PackedLinear([packed], None, dtype, dtype, name=form)
            for rows in ROWS:
                x = torch.randn(rows, depth, device=device, dtype=dtype)
                yield Case(
                    f"product {form}",
                    f"{name} {rows}x{depth}x{columns}",
                    captured(partial(product, x)),
                    "linear",
                    captured(partial(linear, x, weight)),
                    packed.num_bytes + rows * (depth + columns) * dtype.itemsize,
                    2 * rows * depth * columns,
                )


def _forms(weight: torch.Tensor) -> Iterator[tuple[str, PackedRows]]:
    """Yield the weight in 8 bits, and codes of its size in 4 bits, of one level of scales and of two."""
    packed = quantize_rows(weight)
    assert packed is not None, "the weights have scales"
    yield "int8", packed
    columns, depth = weight.shape
    for type_name, weights, num_bytes in (("Q4_0", 32, 18), ("Q4_K", 256, 144)):
        if depth % weights == 0:
            blocks = torch.full((columns, depth // weights, num_bytes), 0x21, dtype=torch.uint8)  # scales of 0.01
            rows = pack_blocks(blocks.view(columns, -1).numpy(), type_name, weight.device)
            assert rows is not None, type_name
            yield type_name, rows
