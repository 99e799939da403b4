"""Run by test_triton_compiles.py in a process without the interpreter: compiles each kernel for an H100 or H200, the
attention kernels for some types and sizes of heads; prints their names. No device is needed. One kernel whose launch
has a constant more or fewer fails here, and so does one that a device could not launch or that spills registers. In
the end it removes from the cache what no run has used for a month.

usage: python -m tests.kernels.triton.compile_triton [every]; every: minutes long, all sizes together, and older devices
too.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from kernels.triton import (
    activation,
    decode_attention,
    embedding,
    gated_activation,
    kv_cache,
    latent,
    log_softmax,
    lora,
    norm,
    ordered_product,
    output_gate,
    packed_linear,
    packed_product,
    prefill_attention,
    prepare_inputs,
    recurrence,
    rope,
    sampling,
    shared_prefix,
    threshold_search,
)
from kernels.triton.arithmetic import caps, rotary_tables
from kernels.triton.attention_work import (
    PREFILL_OPTIONS,
    SPLIT,
    decode_rows,
    kv_tile_tokens,
    prefill_parts,
    tile_tokens,
)
from kernels.triton.device import power_of_2
from kernels.triton.fp8 import fp8_product
from tests.kernels.triton.compile_experts import ROUTING, Experts, each_experts
from tests.kernels.triton.compile_products import Fp8Product, Product, each_fp8_product, each_product, quantizers
from tests.kernels.triton.compile_streams import STREAMS
from tests.kernels.triton.instructions import assert_allowed, assert_defined, assert_one_chain, assert_parts

HALF, FLOAT, DOUBLE, INT, LONG = "*bf16", "*fp32", "*fp64", "*i32", "*i64"
PARTIALS = {"partial_sums": FLOAT, "partial_stats": FLOAT}
POINTERS = {torch.bfloat16: HALF, torch.float16: "*fp16", torch.float32: FLOAT}
#: Bytes of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, "Technical
#: Specifications per Compute Capability").
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
#: Arguments that differ from step to step: a kernel of its own for some of their values would be compiled in between.
OF_STEPS = {"num_splits", "num_tokens", "num_rows", "num_pairs", "is_few"}
#: Arguments that are multiples of 16 in usual models, so that kernels are compiled for that.
OF_MODELS = {"num_columns", "depth", "width", "num_groups", "first_column", "out_columns"}
#: Does not run there, as docs/gpu.md says.
TOO_LARGE = torch.float32, 256, 89
#: Compare weights of tokens, which are not part of any logit.
OF_SAMPLES = sampling.draw_kernel, threshold_search.search_kernel
#: Seconds after which a compiled kernel is removed from the cache: a month.
UNUSED_S = 30 * 86_400
#: Bytes of a thread: some indices. Numbers of a tile would be hundreds.
MOST_SPILLED = 128

#: Compiled without `every`: the types, the largest size, and a small one that is no power of two.
SOME = ((torch.bfloat16, 256), (torch.float32, 20))

#: Kernel, types of its arguments, constants.
KERNELS: tuple[tuple[Any, dict[str, str], dict[str, Any]], ...] = (
    (
        decode_attention.merge_kernel,
        {
            "out": HALF,
            "partial_sums": FLOAT,
            "partial_stats": FLOAT,
            "positions": INT,
            "tokens": INT,
            "num_splits": "i32",
            "value_scale": "fp32",
        },
        {"HEADS": 9, "HEAD_DIM": 80, "BLOCK_D": 128, "SPLIT": 256},
    ),
    (
        norm.norm_kernel,
        {
            "hidden": FLOAT,
            "x": HALF,
            "weight": FLOAT,
            "bias": FLOAT,
            "out": HALF,
            "eps": "fp32",
            "multiplier": "fp32",
        },
        {
            "WIDTH": 576,
            "BLOCK": 1024,
            **dict.fromkeys(("ADDS", "PRECEDES", "REPLACES", "SCALES", "HAS_WEIGHT", "HAS_BIAS", "CENTRED"), True),
        },
    ),
    *(
        (
            activation.activate_kernel,
            {"x": HALF, "out": HALF, "constants": FLOAT},
            {"WIDTH": 1536, "BLOCK": 1024, "FUNCTION": number},
        )
        for number in (1, 3)
    ),
    (output_gate.open_gates_kernel, {"mixed": HALF, "gates": HALF}, {"WIDTH": 1536, "EACH": 64, "BLOCK": 1024}),
    (
        gated_activation.gated_kernel,
        {"gate_up": HALF, "out": HALF},
        {"WIDTH": 1536, "BLOCK": 1024, "FUNCTION": "gelu_pytorch_tanh"},
    ),
    (caps.cap_kernel, {"logits": FLOAT, "cap": "fp32", "size": "i32"}, {"BLOCK": 1024}),
    (
        log_softmax.log_softmax_kernel,
        {"logits": FLOAT, "divisors": FLOAT, "out": FLOAT, "vocab_size": "i32"},
        {"BLOCK": log_softmax.BLOCK},
    ),
    (
        embedding.gather_kernel,
        {
            "ids": LONG,
            "positions": INT,
            "table": HALF,
            "places": FLOAT,
            "kinds": FLOAT,
            "out": FLOAT,
            "scale": "fp32",
            "num_words": "i32",
        },
        {"WIDTH": 576, "BLOCK": 1024, "HAS_PLACES": True, "HAS_KINDS": True},
    ),
    (
        embedding.put_kernel,
        {"places": LONG, "rows": FLOAT, "target": HALF, "stride": "i32"},
        {"WIDTH": 576, "BLOCK": 1024},
    ),
    *(
        (
            embedding.per_layer_kernel,
            {
                "x": HALF,
                "ids": LONG,
                "projected": HALF,
                "table": HALF if has_table else FLOAT,
                "norm": FLOAT,
                "out": HALF,
                "scale": "fp32",
                "eps": "fp32",
                "given_id": "i32",
                "layer": "i32",
            },
            {"LAYERS": 35, "WIDTH": 256, "BLOCK": 256, "HAS_TABLE": has_table},
        )
        for has_table in (True, False)
    ),
    (
        rotary_tables.tables_kernel,
        {
            **dict.fromkeys(("frequencies", "cos", "sin"), FLOAT),
            "positions": INT,
            "factor": "fp32",
            "num_tokens": "i32",
        },
        {"HALF": 40, "BLOCK": 64, "TOKENS": 16},
    ),
    (
        kv_cache.copy_kernel,
        {"source": HALF, "target": HALF, "source_ids": INT, "target_ids": INT},
        {"WIDTH": 6144, "BLOCK": 2048},
    ),
    (
        latent.store_latent_kernel,
        {"keys": HALF, "slots": LONG, "layer": "*i8"},
        {"WIDTH": 576, "BLOCK_SIZE": 16, "BLOCK": 1024},
    ),
    (
        prepare_inputs.prepare_kernel,
        {
            "rows": INT,
            "positions": INT,
            "tokens": INT,
            "tokens_width": "i32",
            "blocks": INT,
            "blocks_width": "i32",
            "token_ids": LONG,
            "slots": LONG,
            "num_tokens": "i32",
        },
        {"BLOCK_SIZE": 16, "BLOCK": 128},
    ),
)

ROPE = {
    **dict.fromkeys(("qkv", "q", "layer"), HALF),
    **dict.fromkeys(("cos", "sin", "head_norms", "growth"), FLOAT),
    "slots": LONG,
    **dict.fromkeys(("eps", "key_scale", "value_scale"), "fp32"),
}

SIZES = {"vocab_size": "i32", "num_pieces": "i32"}
ROWS = {"words": INT, "largest": FLOAT, **SIZES, "num_rows": "i32"}
WINNERS = {"sums": DOUBLE, "winners": INT}
CUTS = {"lows": LONG, "cuts": LONG, "last_cuts": INT}
BLOCK, PIECES = {"BLOCK": sampling.MAX_BLOCK}, {"PIECES": 32}
WARPS = {"num_warps": sampling.NUM_WARPS}

#: The sampler's: kernel, types, constants, options.
SAMPLING: tuple[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]], ...] = (
    (
        sampling.scan_kernel,
        {"logits": FLOAT, "largest": FLOAT, "firsts": INT, "maxima": FLOAT, **SIZES, "num_groups": "i32"},
        BLOCK,
        WARPS,
    ),
    (sampling.draw_kernel, {**ROWS, "logits": FLOAT, **CUTS, **WINNERS}, BLOCK | PIECES, WARPS),
    (sampling.choose_kernel, {**ROWS, "firsts": INT, **WINNERS, "tokens": INT}, PIECES, {}),
    (
        threshold_search.search_kernel,
        {**ROWS, "logits": FLOAT, "maxima": FLOAT, "listed": INT, **CUTS, "num_groups": "i32"},
        {
            "BLOCK": threshold_search.BLOCK,
            **PIECES,
            "GROUPS": 4096,
            "MOST": threshold_search.MOST_GROUPS,
            "SOME": threshold_search.SOME_GROUPS,
        },
        {"num_warps": threshold_search.NUM_WARPS},
    ),
)

#: What packed rows of some types have: pointers of scales and minima, constants of kernels.triton.packed_tile.
_ONE_LEVEL = dict.fromkeys(("scales", "fine", "minima", "fine_minima"), "*fp16")
_TWO_LEVELS = {"scales": FLOAT, "fine": "*i8", "minima": FLOAT, "fine_minima": "*i8"}
_NAMES = ("BIT", "BITS", "ZERO", "GROUP", "FINE", "MINIMA")
PACKED: tuple[tuple[dict[str, str], tuple[int | None, ...]], ...] = (
    (_ONE_LEVEL, (8, 8, 128, 32, False, False)),  # Q8_0
    (_ONE_LEVEL, (8, 4, 8, 32, False, False)),  # Q4_0
    ({**_ONE_LEVEL, "minima": FLOAT}, (8, 4, 0, 32, False, True)),  # Q5_0 in four bits
    (_TWO_LEVELS, (8, 4, 0, 32, True, True)),  # Q4_K
    (_TWO_LEVELS, (16, 7, 32, 16, True, False)),  # Q6_K
    (dict.fromkeys(_ONE_LEVEL, FLOAT), (0, 8, None, 64, False, False)),  # FP8
)


def packed(*, every: bool) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """The kernels of packed weights: for few rows or for as many as there may be, in turn; every: for both and all in
    between, and in float32 too. What unpacks them has the same code in it: of two types, one with each kind of scales.
    """
    groups = "depth", "width", "num_groups"
    numbers = (*groups, "num_columns", "split_tiles", "first_column", "out_columns")
    for dtype in (HALF, FLOAT) if every else (HALF,):
        for turn, (scales, values) in enumerate(PACKED):
            constants = {**dict(zip(_NAMES, values, strict=True)), "INTERPRETED": False, "BLOCK_N": 64}
            types = {"codes": "*u8", **scales}
            for rows in (16,) if dtype == FLOAT else (16, 32, 64, 128) if every else ((16, 128)[turn % 2],):
                yield (
                    packed_product.multiply_packed_kernel,
                    {
                        **dict.fromkeys(("x", "bias", "out"), dtype),
                        **types,
                        "partial_sums": FLOAT,
                        **dict.fromkeys((*numbers, "num_rows"), "i32"),
                    },
                    {
                        **constants,
                        "BLOCK_M": rows,
                        "BLOCK_K": 64 if values[1] == 4 or rows > 32 else 128,
                        "EVEN": True,
                        "DIRECT": rows > 16,
                        "HAS_BIAS": True,
                    },
                    {},
                )
            if not every and turn not in (0, 3):
                continue
            sizes = dict.fromkeys(("num_rows", *groups, "each"), "i32")
            yield (
                packed_linear.unpack_kernel,
                {**types, **sizes, "out": dtype, "used": INT},
                {**constants, "BLOCK_K": 64 if values[1] == 4 else 128, "EVEN": True, "CHECKS": turn % 2 == 0},
                {},
            )
    sizes = dict.fromkeys(("num_rows", "num_columns", "first_column", "out_columns"), "i32")
    types = {**dict.fromkeys(("bias", "out"), HALF), "partial_sums": FLOAT, **sizes}
    yield packed_product.merge_parts_kernel, types, {"PARTS": 8, "BLOCK": 1024, "HAS_BIAS": True}, {}


class Attention(NamedTuple):
    dtype: torch.dtype
    head_dim: int
    group_size: int
    block_size: int
    window: int
    direct: bool
    stored: str = ""  # the pointer type of a cache in 8 bits
    is_part: bool = False  # of two forms of a kernel only one, in turn

    def kernels(self) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
        """All, with their arguments' types, constants and options as launched.

        is_part: what decoding is without shared rows is compiled for caches in 8 bits.
        """
        pointer, group = POINTERS[self.dtype], self.group_size
        layer = {"layer": self.stored or pointer, "rows": INT, "positions": INT, "tables": INT, "table_width": "i32"}
        common = {"q": pointer, "out": pointer, **layer, "scale": "fp32", "soft_cap": "fp32", "sinks": FLOAT}
        common["value_scale"] = "fp32"
        constants = {
            "HEADS": 2 * group,
            "KV_HEADS": 2,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": max(16, power_of_2(self.head_dim)),
            "BLOCK_SIZE": self.block_size,
            "BLOCK_N": kv_tile_tokens(self.head_dim, self.dtype),
            "WINDOW": self.window,
            "HAS_CAP": True,
            "HAS_SINKS": True,
        }
        parts = {**PARTIALS, "tokens": INT, "shared": INT, "common": INT, "num_splits": "i32"}
        for shares in (True,) if self.is_part else (False, True):
            rows = {"BLOCK_M": decode_rows(group), "SPLIT": SPLIT, "DIRECT": self.direct, "SHARES": shares}
            rows["HAS_COMMON"] = not self.direct and not shares
            yield decode_attention.decode_kernel, common | parts, constants | rows, {}
        prefix = {**PARTIALS, "tokens": INT, "num_tokens": "i32", "common": INT, "num_splits": "i32"}
        sizes = {name: value for name, value in constants.items() if name != "WINDOW"}
        types = {name: kind for name, kind in common.items() if name not in ("out", "value_scale")} | prefix
        fewest, most = decode_rows(group), shared_prefix.most_rows(self.head_dim)
        for block_m in (most if self.direct else fewest,) if self.is_part else (fewest, most):
            yield shared_prefix.shared_prefix_kernel, types, sizes | {"BLOCK_M": block_m, "SPLIT": SPLIT}, {}
        tiles = dict.fromkeys(("tile_tokens", "tile_counts", "lasts"), INT)
        rows = {"BLOCK_M": tile_tokens(group) * power_of_2(group) // prefill_parts(self.head_dim), "SPLIT": SPLIT}
        rows["HAS_LASTS"] = self.direct  # in turn
        yield prefill_attention.prefill_kernel, common | tiles, constants | rows, PREFILL_OPTIONS


def each_size() -> Iterator[Attention]:
    """Each type with each size of heads; the rest in turn."""
    heads = product((torch.bfloat16, torch.float32), (16, 64, 80, 128, 256, 20))
    for turn, head in enumerate(heads):
        group, block_size = (1, 3, 4, 8)[turn % 4], (16, 64, 32)[turn % 3]
        yield Attention(*head, group, block_size, window=100 * (turn % 2), direct=turn % 2 == 0)


def in_8_bits(head_dims: Sequence[int]) -> Iterator[Attention]:
    """Of caches in 8 bits, each with heads of these sizes."""
    for head_dim, stored in product(head_dims, ("*i8", "*u8")):
        yield Attention(torch.bfloat16, head_dim, 4, 16, window=0, direct=stored == "*i8", stored=stored)


def all_sizes() -> Iterator[Attention]:
    yield from in_8_bits((16, 64, 80, 128, 256, 576))
    yield Attention(torch.bfloat16, 576, 16, 16, window=0, direct=False)  # latent attention of DeepSeek's models
    sizes = product(POINTERS, (16, 20, 32, 64, 80, 96, 128, 256), (1, 3, 4, 8), (16, 64))
    for turn, size in enumerate(sizes):
        yield Attention(*size, window=100 * (turn // 2 % 2), direct=turn % 2 == 0)


def ropes(*, every: bool) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """The kernel of rotation with what some models have; every: all, and of models with many heads."""
    kinds: tuple[set[str], ...] = ({"NORMS", "OF_ROWS", "CENTRED"}, {"NORMS", "AFTER", "GROWS", "NORMED_VALUES"})
    names = ("NORMS", "OF_ROWS", "CENTRED", "AFTER", "GROWS", "NORMED_VALUES")
    if every:
        kinds += (set(), {"NORMS"}, {"NORMS", "OF_ROWS"}, {"NORMS", "CENTRED"})
    for heads, kv_heads, head_dim in ((9, 3, 80), *(((40, 40, 128), (96, 8, 128), (16, 8, 256)) if every else ())):
        sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16}
        blocks = {"BLOCK_HEADS": heads + kv_heads, "BLOCK_KV": kv_heads, "BLOCK_HALF": head_dim // 2}
        sizes |= {name: power_of_2(size) for name, size in blocks.items()}
        for turn, kind in enumerate(kinds):
            first, own, own_kv = (1, heads - 1, 1) if "OF_ROWS" in kind else (0, heads, kv_heads)  # those of a rank
            sizes |= {"FIRST": first, "OWN_HEADS": own, "FIRST_KV": first, "OWN_KV_HEADS": own_kv}
            stored = {"layer": ("*i8", HALF, "*u8")[turn % 3]}
            sides = {"SIDES": 2 if turn % 2 == 0 else 1}
            yield rope.rope_kernel, ROPE | stored, {**sizes, **sides, **{name: name in kind for name in names}}, {}


def recurrences() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """The kernels of layers with a state: a short convolution, and heads of the sizes of Qwen3-Next and Nemotron-H."""
    places = {"x": HALF, "positions": INT, "rows": INT, "firsts": INT}
    numbers = dict.fromkeys(("width", "state_size", "offset"), "i32")
    common = {**places, "owners": INT, "states": FLOAT, **numbers, "start": "i32"}
    for is_short in (True, False):
        sizes = {"TAPS": 3 if is_short else 4, "CHANNELS": 2048, "SHORT": is_short, "BLOCK": recurrence.CHANNELS}
        convolved = {**common, "kernel": FLOAT, "bias": FLOAT, "out": HALF if is_short else FLOAT}
        yield recurrence.convolve_kernel, convolved, {**sizes, "HAS_BIAS": not is_short}, {}
        yield recurrence.keep_inputs_kernel, {**common, "saves": INT}, {**sizes, "SAVES": not is_short}, {}
    given = {**places, "mixed": FLOAT, "states": FLOAT, "saves": INT, **numbers, "betas_at": "i32", "steps_at": "i32"}
    given |= dict.fromkeys(("rates", "step_biases", "skips", "out"), FLOAT)
    given |= dict.fromkeys(("least_step", "most_step", "most_beta", "scale"), "fp32")
    for is_delta, heads, groups, size in ((True, 32, 16, 128), (False, 64, 8, 64)):
        channels = 2 * groups * 128 + heads * size
        sizes = {"CHANNELS": channels, "HEADS": heads, "GROUPS": groups, "KEYS": 128, "VALUES": size, "STRIDE": size}
        kind = {"TURNS": False, "DELTA": is_delta, "SAVES": is_delta, "SKIPS": not is_delta}
        blocks = {"BLOCK_K": 128, "BLOCK_V": recurrence.COLUMNS}
        yield recurrence.recur_kernel, given, {**sizes, **kind, **blocks}, {}
        ends = {"results": FLOAT, "x": HALF, "norm": FLOAT, "out": HALF}
        ends |= {"width": "i32", "gates_at": "i32", "eps": "fp32"}
        parts = {"WIDTH": 128, "PARTS": heads, "BEFORE": not is_delta, "GATED": True, "NORMED": True, "BLOCK": 128}
        yield recurrence.close_kernel, ends, parts, {}
        if not is_delta:  # of a rank: gates, and after an exchange the norm
            yield recurrence.close_kernel, {**ends, "out": FLOAT}, {**parts, "NORMED": False}, {}
            yield recurrence.close_kernel, ends, {**parts, "GATED": False}, {}


def loras(*, every: bool) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """The kernels of adapters, for few tokens and for many in turn; every: for both."""
    work = {"tokens": INT, "adapters": INT, "addresses": LONG, "ranks": INT}
    for turn, (dtype, depth) in enumerate(((FLOAT, lora.FLOAT_DEPTH), (HALF, lora.DEPTH))):
        sizes_of_tiles = list(lora.TILE_TOKENS.values())
        for size in sizes_of_tiles if every else sizes_of_tiles[turn : turn + 1]:
            sizes = {"SIZE": size, "BLOCK_R": lora.RANK_STEP}
            lower = {"x": dtype, **work, "out": FLOAT, "depth": "i32", "stride": "i32"}
            yield lora.lower_kernel, lower, {**sizes, "BLOCK_K": depth, "EVEN": size > 16}, {}
            above = {"lowered": FLOAT, **work, "y": dtype, "num_columns": "i32", "stride": "i32"}
            yield lora.raise_kernel, above, {**sizes, "BLOCK_C": lora.TILE_COLUMNS}, {}


def build(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int = 90, **options: int
) -> tuple[int, int]:
    """Bytes of shared memory of a program, and of what its threads' registers spill to."""
    given = types.keys() | constants.keys()
    assert given == set(kernel.arg_names), (kernel.__name__, given ^ set(kernel.arg_names))
    assert all(param.do_not_specialize for param in kernel.params if param.name in OF_STEPS), kernel.__name__
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    pointers = (name for name, kind in types.items() if kind[0] == "*" or name in OF_MODELS)
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(ASTSource(kernel, signature, places, aligned), target=target, options=options)
    os.utime(get_cache_manager(compiled.hash).cache_dir)
    if kernel is fp8_product.fp8_product_kernel:
        assert_parts(compiled.asm["ptx"], capability, has_bias=constants["HAS_BIAS"])
    else:
        assert_allowed(compiled.asm["ptx"])
    if kernel not in OF_SAMPLES:
        assert_defined(compiled.asm["ptx"])
    if kernel is ordered_product.product_kernel:
        ends = not constants["HAS_BIAS"] and not constants["FUNCTION"]
        assert_one_chain(compiled.asm["ptx"], is_float=types["x"] == FLOAT, ends=ends)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found, usage
    return compiled.metadata.shared, int(found[1])


def main() -> None:
    every = sys.argv[1:] == ["every"]
    for kernel, types, constants, options in (
        *((*kernel, {}) for kernel in KERNELS),
        *ropes(every=every),
        *loras(every=every),
        *recurrences(),
        *packed(every=every),
        *quantizers(every=every),
        *SAMPLING,
        *ROUTING,
        *STREAMS,
    ):
        print(kernel.__name__, flush=True)
        shared, spilled = build(kernel, types, constants, **options)
        most = MOST_SPILLED if kernel is threshold_search.search_kernel else 0
        assert shared <= SHARED[90], (kernel.__name__, shared)
        assert spilled <= most, (kernel.__name__, spilled)
    sizes = [(size._replace(is_part=True), 90) for size in each_size() if (size.dtype, size.head_dim) in SOME]
    for size in in_8_bits((16,)):  # the first kernel: what reads a cache in 8 bits is the same in all
        check(size, 90, first=1)
    if every:
        sizes = [(size, 90) for size in all_sizes()] + [
            (size, old) for size in each_size() for old in (80, 89, 100, 120)
        ]
    for size, capability in sizes:
        check(size, capability, fits=(size.dtype, size.head_dim, capability) != TOO_LARGE)
    for capability in SHARED if every else (90,):
        for fp8 in each_fp8_product(every=every) if capability >= 89 else ():
            check(fp8, capability)
        for routed in (*each_experts(SHARED[capability], every=every), *each_product(SHARED[capability], every=every)):
            check(routed, capability)
    remove_unused(Path(triton.knobs.cache.dir))


def remove_unused(cache: Path) -> None:
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):  # another checkout's run removes it, or it is no folder
            if folder.stat().st_mtime < time.time() - UNUSED_S:
                shutil.rmtree(folder)


def check(
    size: "Attention | Experts | Product | Fp8Product", capability: int, *, fits: bool = True, first: int | None = None
) -> None:
    """Compile the kernels of this size, or the first so many, and print their names. fits: shared memory has room."""
    for kernel, types, constants, options in islice(size.kernels(), first):
        print(kernel.__name__, flush=True)
        shared, spilled = build(kernel, types, constants, capability, **options)
        assert shared <= SHARED[capability] or not fits, (kernel.__name__, size, capability, shared)
        assert spilled <= MOST_SPILLED, (kernel.__name__, size, capability, spilled)


if __name__ == "__main__":
    main()
