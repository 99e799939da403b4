"""The kernels of hidden states in several streams as a device compiles them, of the sizes of Gemma 3n E4B."""

from typing import Any

from kernels.triton.streams import mixing, sparse_gate

HALF, FLOAT = "*bf16", "*fp32"
ROW = {"WIDTH": 2048, "BLOCK": 2048}
PART = {"WIDTH": 2048, "BLOCK": 1024}
COUNTS = {"COUNT": 4, "BLOCK_S": 4}

#: Kernel, types of its arguments, constants, options.
STREAMS: tuple[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]], ...] = (
    (
        mixing.predict_kernel,
        {**dict.fromkeys(("streams", "logits", "coefficients", "out"), FLOAT), "num_rows": "i32"},
        PART | COUNTS,
        {},
    ),
    (
        mixing.correct_kernel,
        {**dict.fromkeys(("streams", "logits", "coefficients", "after", "out"), FLOAT), "num_rows": "i32"},
        PART | COUNTS | {"ACTIVE": 0},
        {},
    ),
    (
        mixing.join_kernel,
        {**dict.fromkeys(("active", "attended", "residual", "out"), FLOAT), "x": HALF},
        PART,
        {},
    ),
    (
        mixing.resize_kernel,
        dict.fromkeys(("x", "like", "before", "out"), FLOAT),
        ROW | {"ADDS": True, "PARTS": 4},
        {},
    ),
    (
        sparse_gate.sparse_gate_kernel,
        {"gate": FLOAT, "up": FLOAT, "out": HALF, "num_deviations": "fp32"},
        {"WIDTH": 16384, "BLOCK": 16384},
        {"num_warps": sparse_gate.NUM_WARPS},
    ),
)
