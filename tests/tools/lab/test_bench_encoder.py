"""The benchmark of encoders, on a tiny one: ours and transformers' take turns."""

import pytest

from kernels.cpu.library import load_cpu_library
from tools.lab.bench.encoder import QWEN3_VL_2B, measure_encoder

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports


def test_both_encoders_are_measured() -> None:
    sizes = {"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 2048}
    vision = {**QWEN3_VL_2B.vision, **sizes, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    shape = QWEN3_VL_2B._replace(vision=vision, height=64, width=96)
    records = list(measure_encoder({"dtype": "float32", "threads": 1}, rounds=1, shape=shape))
    load_cpu_library().stop_threads()
    assert [record["engine"].split()[0] for record in records] == ["engine-core", "transformers"]
    assert records[0]["ratio"] == 1
    assert all(record["ms"] > 0 for record in records)
