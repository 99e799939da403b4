"""Run by test_triton_compiles.py in a process without the interpreter: compiles each kernel for an H100 or H200; prints
its name. No device is needed. One kernel whose launch has a constant more or fewer fails here."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton import (
    copy_blocks,
    decode_attention,
    embedding,
    gated_activation,
    prefill_attention,
    prepare_inputs,
    rms_norm,
    rope,
    sampling,
)

HALF, FLOAT, INT, LONG = "*bf16", "*fp32", "*i32", "*i64"
HEADS = {"HEADS": 9, "KV_HEADS": 3, "HEAD_DIM": 80}
ATTENTION = {
    **HEADS,
    "BLOCK_D": 128,
    "BLOCK_SIZE": 16,
    "BLOCK_N": 64,
    "WINDOW": 100,
    "HAS_CAP": True,
    "UPCAST": False,
}
LAYER = {"layer": HALF, "rows": INT, "positions": INT, "tables": INT, "table_width": "i32"}
SCALES = {"scale": "fp32", "soft_cap": "fp32"}
PARTIALS = {"partial_sums": FLOAT, "partial_stats": FLOAT}

#: Kernel, types of its arguments, constants.
KERNELS: tuple[tuple[Any, dict[str, str], dict[str, Any]], ...] = (
    (
        decode_attention._decode,
        {"q": HALF, "out": HALF, **PARTIALS, **LAYER, "tokens": INT, **SCALES, "num_splits": "i32"},
        {**ATTENTION, "BLOCK_M": 16, "SPLIT": 256, "DIRECT": False},
    ),
    (
        decode_attention._merge,
        {"out": HALF, **PARTIALS, "positions": INT, "tokens": INT, "num_splits": "i32"},
        {"HEADS": 9, "HEAD_DIM": 80, "BLOCK_D": 128, "SPLIT": 256},
    ),
    (
        prefill_attention._prefill,
        {"q": HALF, "out": HALF, **LAYER, "tile_tokens": INT, "tile_counts": INT, **SCALES},
        {**ATTENTION, "BLOCK_M": 64},
    ),
    (
        sampling._sample,
        {"logits": FLOAT, "words": INT, "tokens": INT, "vocab_size": "i32", "num_rows": "i32"},
        {"BLOCK": 1024},
    ),
    (
        rope._rope,
        {
            "qkv": HALF,
            "cos": FLOAT,
            "sin": FLOAT,
            "head_norms": FLOAT,
            "slots": LONG,
            "q": HALF,
            "layer": HALF,
            "eps": "fp32",
        },
        {**HEADS, "BLOCK_SIZE": 16, "BLOCK_HEADS": 16, "BLOCK_KV": 4, "BLOCK_HALF": 64, "NORMS": True},
    ),
    (
        rms_norm._norm,
        {"hidden": FLOAT, "x": HALF, "weight": FLOAT, "out": HALF, "eps": "fp32"},
        {"WIDTH": 576, "BLOCK": 1024, "ADDS": True},
    ),
    (gated_activation._gated, {"gate_up": HALF, "out": HALF}, {"WIDTH": 1536, "BLOCK": 1024, "GELU": True}),
    (embedding._gather, {"ids": LONG, "table": HALF, "out": FLOAT, "scale": "fp32"}, {"WIDTH": 576, "BLOCK": 1024}),
    (
        copy_blocks._copy,
        {"source": HALF, "target": HALF, "source_ids": INT, "target_ids": INT},
        {"WIDTH": 6144, "BLOCK": 2048},
    ),
    (
        prepare_inputs._prepare,
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


def main() -> None:
    for kernel, types, constants in KERNELS:
        given = types.keys() | constants.keys()
        assert given == set(kernel.arg_names), (kernel.__name__, given ^ set(kernel.arg_names))
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))
        assert compiled.asm["cubin"]
        print(kernel.__name__, flush=True)


if __name__ == "__main__":
    main()
