"""The routed MLP of one layer of a model alone, with made-up weights: for bench gemm.

Each run draws new rows, so weights come from memory. A record's gb_s counts the weights that are read: those of the
experts chosen by a run's rows.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from core.model_files.model_config import ModelConfig
from core.models.config import ExpertParts
from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from kernels.cpu.decoder_parts import DenseParts, exceed_caches
from kernels.cpu.experts import CpuExperts
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary
from kernels.elements import FLOAT32, Dtype, Numbers, rounded, to_floats
from kernels.routing import Routing

_SECONDS = 1.0  # for each number of rows


class _Form(NamedTuple):
    """A form of the weights in memory."""

    name: str  # after the kernel's name
    is_4_bits: bool = False  # Q4_0, as in GPTQ, AWQ and GGUF files; else the model's dtype, or Q8_0
    in_8_bits: bool = False  # products in 8 bits

    @property
    def is_stored(self) -> bool:
        """Whether weights are quantized."""
        return self.is_4_bits or self.in_8_bits


_FORMS = (_Form(""), _Form("-q4_0", is_4_bits=True), _Form("-q4_0-int8", True, True), _Form("-int8", in_8_bits=True))


def measure_experts(
    library: CpuLibrary, config: ModelConfig, parts: ExpertParts, dtype: Dtype, rows: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield a record for each form of the weights and number of rows; us is the shortest time of a run."""
    rng = np.random.default_rng(0)
    router = _random(rng, parts.num_experts, config.hidden_size, dtype)
    for form in _FORMS:
        name = f"c-{library.variant}{form.name}"
        experts = _experts(library, config, parts, router, dtype, form)
        each = (experts.num_bytes - experts.router.packed.nbytes) / parts.num_experts
        for num_rows in rows:
            seconds, num_chosen = _measure(experts, to_floats(router), parts.num_chosen, num_rows, dtype, rng)
            yield {
                "kernel": name,
                "product": "experts",
                "shape": [parts.num_experts, parts.intermediate_size, config.hidden_size],
                "rows": num_rows,
                "experts_read": num_chosen,
                "us": round(seconds * 1e6, 2),
                "gb_s": round(num_chosen * each / seconds / 1e9, 2),
            }
        del experts


def _random(rng: np.random.Generator, rows: int, depth: int, dtype: Dtype) -> Numbers:
    return rounded(rng.standard_normal((rows, depth), np.float32) * np.float32(depth**-0.5), dtype)


def _as_q4_0(matrix: Numbers) -> StoredMatrix:
    """Return a matrix of random blocks of Q4_0: 32 codes of 4 bits and a float16 scale."""
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (len(matrix), matrix.shape[1] // 32, 18), np.uint8)
    blocks[..., :2] = np.array([0.01], np.float16).view(np.uint8)
    return StoredMatrix([StoredPart("Q4_0", blocks.reshape(len(matrix), -1), matrix.shape[1])])


def _experts(
    library: CpuLibrary, config: ModelConfig, parts: ExpertParts, router: Numbers, dtype: Dtype, form: _Form
) -> CpuExperts:
    """Return the routed MLP of one layer, whose experts have equal weights, each in separate memory."""
    rng, hidden = np.random.default_rng(1), config.hidden_size
    gate_up = _random(rng, 2 * parts.intermediate_size, hidden, dtype)
    down = _random(rng, hidden, parts.intermediate_size, dtype)
    streams = exceed_caches(parts.num_experts * (gate_up.nbytes + down.nbytes))

    def packed(weight: Numbers, gate: str | None = None, out_dtype: Dtype | None = None) -> PackedMatrix:
        stored: Any = weight
        if form.is_stored:
            matrix = _as_q4_0(weight) if form.is_4_bits else StoredMatrix.of(weight)
            stored = matrix.quantized(library, is_gated=gate is not None, in_8_bits=form.in_8_bits)
        return PackedMatrix(library, stored, dtype=dtype, gate=gate, out_dtype=out_dtype, is_kept=not streams)

    experts = CpuExperts(
        library,
        PackedMatrix(library, router, dtype=dtype, out_dtype=FLOAT32),
        [
            DenseParts(packed(gate_up, gate=config.hidden_act), packed(down, out_dtype=FLOAT32))
            for _ in range(parts.num_experts)
        ],
        Routing(parts.num_chosen, parts.normalises),
    )
    experts.set_streams(streams)
    return experts


def _measure(
    experts: CpuExperts, router: Numbers, num_chosen: int, num_rows: int, dtype: Dtype, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the seconds of the fastest run for its experts, and how many experts it read."""
    best = (0.0, 0.0)
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        x = rounded(rng.standard_normal((num_rows, router.shape[1]), np.float32), dtype)
        chosen = np.argsort(-(to_floats(x) @ router.T), axis=1)[:, :num_chosen]
        begin = time.perf_counter()
        experts(x)
        seconds, count = time.perf_counter() - begin, float(len(np.unique(chosen)))
        if best[0] == 0.0 or seconds / count < best[0] / best[1]:
            best = (seconds, count)
    return best
