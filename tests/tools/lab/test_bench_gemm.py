"""bench gemm with the matrices of a GGUF file."""

import pytest

from ipc.options.config import EngineConfig
from kernels.cpu.build import usable_variants
from tools.lab.bench import gemm


def test_gemm_measures_a_gguf_files_matrices_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_SECONDS", 0.0)
    monkeypatch.setattr(gemm, "_COPIES_BYTES", 1)
    monkeypatch.setattr(gemm, "_READ_SECONDS", 0.0)
    for name in ("plain_product", "prepacked_product"):
        monkeypatch.setattr(gemm, name, lambda weight: lambda x: None)
    records = list(gemm.measure_gemm(EngineConfig(threads=1, dtype="bfloat16"), (1,), rep=0))
    found = {record["kernel"]: record for record in records if record.get("product") == "gate_up"}
    name = f"c-{usable_variants()[0]}"
    read = records[0]["gb_s"]
    assert found[name]["gb_s"] * found[name]["us"] < 3072 * 576 * 2 / 1e3  # compact
    for kernel in (f"{name}-stored", f"{name}-int8"):  # Q4_1: 20 bytes for 32 weights
        assert found[kernel]["gb_s"] * found[kernel]["us"] == pytest.approx(3072 * 576 * 20 / 32 / 1e3, rel=0.05)
        assert found[kernel]["of_read"] == pytest.approx(found[kernel]["gb_s"] / read, rel=0.05)
