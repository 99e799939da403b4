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
from torch.nn.functional import grouped_mm, linear, rms_norm, scaled_dot_product_attention, silu

from core.device import cuda_device
from ipc.options.config import EngineConfig
from ipc.tables.rounding import ceil_div
from ipc.version import NAME, VERSION
from kernels.routing import Routing
from kernels.torch.linear import Operation
from kernels.torch.packed_rows import PackedRows, pack_blocks, quantize_rows
from kernels.torch.tensors import element_type
from kernels.triton.linear import DeviceLinear, GatedLinear

# Case: a kernel on a GPU, measured next to torch's own operation.


class Case(NamedTuple):
    """One kernel on one shape, and torch's operation for the same work."""

    kernel: str
    shape: str
    run: Callable[[], object]
    theirs: str
    torch_run: Callable[[], object]
    num_bytes: float  # read and written at least once
    num_flops: float


# Cases of routed MLPs on a GPU: a whole one, from the router to the sum, next to one with torch's grouped product.


class ExpertShape(NamedTuple):
    """The sizes of a routed MLP whose weights sum to 1, and the numbers of tokens to measure."""

    num_experts: int
    num_chosen: int
    hidden: int
    intermediate: int  # of an expert
    tokens: tuple[int, ...]


QWEN3_30B = ExpertShape(128, 8, 2048, 768, (1, 8, 64, 2048))  # Qwen3-30B-A3B's


class Expert(NamedTuple):
    """The parts of one expert."""

    gate_up: DeviceLinear
    activation: Operation
    down: DeviceLinear


class TorchMlp(NamedTuple):
    """A routed MLP made of torch's operations, of one dtype."""

    router: torch.Tensor  # [experts, hidden]
    gate_up: torch.Tensor  # [experts, 2 * intermediate, hidden]
    down: torch.Tensor  # [experts, hidden, intermediate]
    num_chosen: int

    def chosen(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the numbers of each token's experts."""
        weights, experts = linear(x, self.router).float().softmax(-1).topk(self.num_chosen)
        return weights / weights.sum(-1, keepdim=True), experts

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of x, with the tokens sorted by expert, without waiting for the host."""
        weights, experts = self.chosen(x)
        sorted_experts, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(len(self.router), device=x.device)
        ends = torch.searchsorted(sorted_experts, numbers, right=True).int()
        gate, up = grouped_mm(x[order // self.num_chosen], self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        results = grouped_mm(silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        of_pairs = torch.empty_like(results).index_copy_(0, order, results)
        return (of_pairs.view(len(x), self.num_chosen, -1) * weights[:, :, None]).sum(1).to(x.dtype)

    def looped(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of x, expert by expert; the host waits for their numbers."""
        weights, experts = self.chosen(x)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in sorted(set(experts.flatten().tolist())):
            rows, places = (experts == number).nonzero(as_tuple=True)
            gate, up = linear(x[rows], self.gate_up[number]).chunk(2, -1)
            results = linear(silu(gate) * up, self.down[number])
            out.index_add_(0, rows, results * weights[rows, places, None])
        return out.to(x.dtype)

    def best(self, x: torch.Tensor) -> tuple[str, Callable[[], torch.Tensor]]:
        """Return (name, call): torch has the grouped product on a GPU for bfloat16 only."""
        if x.dtype == torch.bfloat16:
            return "sort, grouped_mm", captured(partial(self.grouped, x))
        return "linear, index_add", partial(self.looped, x)


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a call that replays run's launches as a CUDA graph, as decoding steps do, so the host takes no time."""
    out = run()  # compiles
    if not out.is_cuda:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def expert_cases(shape: ExpertShape, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield a case for each number of tokens. The bytes are those of the experts that these tokens choose."""
    from kernels.torch.gated_activation import silu_mul
    from kernels.triton.routed.expert_products import StackedProduct
    from kernels.triton.routed.experts import TritonExperts

    num_experts, num_chosen, hidden, width, tokens = shape
    made = partial(torch.randn, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    router = made(num_experts, hidden) * hidden**-0.5
    experts = [
        Expert(
            DeviceLinear(made(2 * width, hidden) * hidden**-0.5),
            silu_mul,
            DeviceLinear(made(hidden, width) * width**-0.5),
        )
        for _ in range(num_experts)
    ]
    ours = TritonExperts(
        DeviceLinear(router, out_dtype=torch.float32),
        experts,
        Routing(num_chosen, normalises=True),
        None,
        function="silu",
    )
    assert isinstance(ours.gate_up, StackedProduct), type(ours.gate_up)
    assert isinstance(ours.down, StackedProduct), type(ours.down)
    theirs = TorchMlp(router, ours.gate_up.weight, ours.down.weight, num_chosen)
    for count in tokens:
        x = made(count, hidden)
        num_read = len(set(theirs.chosen(x)[1].flatten().tolist()))
        numbers = num_read * 3 * hidden * width + num_experts * hidden + 2 * count * hidden
        flops = 2 * count * hidden * (num_chosen * 3 * width + num_experts)
        name, run = theirs.best(x)
        yield Case(
            "routed MLP",
            f"{count}x{num_experts}x{width}",
            captured(partial(ours, x)),
            name,
            run,
            numbers * dtype.itemsize,
            flops,
        )


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
def measure_gpu_kernels(
    config: EngineConfig, rep: int, shapes: Shapes = LLAMA_8B, *, name: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield a record for each kernel and shape. name: how the kernels' names begin. Errors: ConfigError without a GPU.

    The product that fractions refer to has random numbers: with zeros a GPU draws less power, and is faster.
    """
    device = cuda_device()
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    source = torch.empty(shapes.copied // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    square = torch.randn(shapes.square, shapes.square, device=device).to(dtype)
    bandwidth = shapes.copied / seconds(lambda: target.copy_(source))
    peak = 2 * shapes.square**3 / seconds(lambda: square @ square)
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    common: dict[str, Any] = {
        "engine": NAME,
        "version": VERSION,
        "workload": "kernels",
        "device": device_name,
        "dtype": str(dtype).removeprefix("torch."),
        "copy_gb_s": round(bandwidth / 1e9, 1),
        "product_tflop_s": round(peak / 1e12, 3),
        "rep": rep,
    }
    for case in _cases(shapes, device, dtype):
        if not case.kernel.startswith(name):
            continue
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
    """Yield a case for each shape, name -> (out, in), each form and each number of rows. Dense weights come first."""
    from kernels.triton.device import has_fp8
    from kernels.triton.fp8.fp8_linear import Fp8Linear
    from kernels.triton.fp8.fp8_product import quantized
    from kernels.triton.packed_linear import PackedLinear

    for name, (columns, depth) in shapes.items():
        weight = torch.randn(columns, depth, device=device, dtype=dtype) * 0.02
        layers: list[tuple[str, Operation, int]] = [("ordered", DeviceLinear(weight), weight.nbytes)]
        for form, packed in _forms(weight):
            layers.append((form, PackedLinear([packed], None, dtype, dtype, name=form), packed.num_bytes))
        if has_fp8(device):
            rows_in_fp8 = quantized(weight)
            layers.append(("fp8", Fp8Linear(rows_in_fp8, None, dtype, dtype), rows_in_fp8.num_bytes))
        for form, product, num_bytes in layers:
            for rows in ROWS:
                x = torch.randn(rows, depth, device=device, dtype=dtype)
                yield Case(
                    f"product {form}",
                    f"{name} {rows}x{depth}x{columns}",
                    captured(partial(product, x)),
                    "linear",
                    captured(partial(linear, x, weight)),
                    num_bytes + rows * (depth + columns) * dtype.itemsize,
                    2 * rows * depth * columns,
                )
    if "gate_up" in shapes:
        yield from _gated_products(*shapes["gate_up"], device, dtype)


def _gated_products(columns: int, depth: int, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield a case for each number of rows: the product of gate and up, and silu(gate) * up in its end."""
    weight = torch.randn(columns, depth, device=device, dtype=dtype) * 0.02
    layer = GatedLinear(weight, None, "silu")
    for rows in ROWS:
        x = torch.randn(rows, depth, device=device, dtype=dtype)

        def theirs(x: torch.Tensor = x) -> torch.Tensor:
            gate, up = linear(x, weight).chunk(2, -1)
            return silu(gate) * up

        yield Case(
            "product gated",
            f"gate_up {rows}x{depth}x{columns}",
            captured(partial(layer, x)),
            "linear, silu, *",
            captured(theirs),
            weight.nbytes + rows * (depth + columns // 2) * dtype.itemsize,
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
