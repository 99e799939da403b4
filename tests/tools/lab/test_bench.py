"""The benchmarks: their workloads to the token, and their records. No test looks at a time's size."""

import inspect
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from core.model_files.model_config import read_model_config
from ipc.errors import ConfigError
from ipc.files.safetensors import read_safetensors_folder
from ipc.options.config import EngineConfig
from kernels.cpu.build import usable_variants
from kernels.elements import BFLOAT16
from kernels.triton import device
from kernels.triton.device import NoDeviceError
from tests import grammar_vocabulary
from tools.commands.replay.latency import percentile
from tools.lab.bench import gemm, ipc, kernels, quiet, step, structured
from tools.lab.bench.__main__ import main, summary_ms
from tools.lab.bench.costs import capture_cost, metrics_cost
from tools.lab.bench.gpu import gpu_kernels
from tools.lab.bench.gpu.gpu_kernels import ExpertShape
from tools.lab.bench.runs import is_clean
from tools.lab.bench.startup import kernel_cache
from tools.lab.bench.startup_parts import has_parts, measure_parts
from tools.lab.bench.tiny_model import VOCAB_SIZE, write_tiny_model
from tools.lab.bench.workloads import WORKLOADS, Workload, make_workload, read_workload, warm_up_workload

ROOT = Path(__file__).resolve().parent.parent.parent.parent

#: requests, tokens in, tokens out, CRC-32 of all prompt ids as int32.
SHAPES = {
    "lat1": (1, 128, 128, 0x30DAAC88),
    "batch8": (8, 1024, 1024, 0x20EC450B),
    "batch32": (32, 8546, 2506, 0x578D11A7),
    "prefix": (16, 8704, 512, 0x1FF2A50C),
    "long": (1, 2000, 16, 0xC14FF4C6),
    "host256": (256, 8192, 32768, 0x427C14D4),
}


def bench(*arguments: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "engine_core", "bench", *arguments, "--executor", "fake", "--quiet-seconds", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def crc(workload: Workload) -> int:
    return zlib.crc32(np.concatenate([np.array(request.prompt, "<i4") for request in workload.requests]).tobytes())


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_everywhere(name: str) -> None:
    """Numbers are compared across engines and years, so the ids may never change."""
    workload = make_workload(name)
    assert (
        len(workload.requests),
        workload.num_prompt_tokens,
        workload.num_output_tokens,
        crc(workload),
    ) == SHAPES[name]


def test_rounds_have_other_ids_of_the_same_shape() -> None:
    first = make_workload("prefix")
    second = first.shifted(3)
    assert [len(request.prompt) for request in second.requests] == [544] * 16
    ids = {token for request in second.requests for token in request.prompt}
    assert 20 <= min(ids) <= max(ids) < 20 + first.id_span
    shared = [request.prompt[:512] for request in second.requests]
    assert shared == [shared[0]] * 16, "what is shared stays shared"
    assert shared[0][:16] != first.requests[0].prompt[:16]
    assert first.shifted(0) == first


def test_a_workload_file_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "requests": [{"prompt": [20, 21], "max_tokens": 3}]}')
    assert read_workload(path).num_output_tokens == 3
    for bad in ("{", '{"name": "mine", "requests": []}', '{"name": 1, "requests": []}', '{"requests": 2}'):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="--workload"):
            read_workload(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_workload(tmp_path / "none.json")


def test_the_warm_up_stays_in_the_vocabulary() -> None:
    ids = [token for request in warm_up_workload(1900).requests for token in request.prompt]
    assert 20 <= min(ids) <= max(ids) < VOCAB_SIZE


def test_the_tiny_model_is_a_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = read_model_config(tmp_path)
    assert (config.num_hidden_layers, config.vocab_size, config.hidden_size) == (1, VOCAB_SIZE, 64)
    (tensors,) = read_safetensors_folder(tmp_path).values()
    assert tensors["model.embed_tokens.weight"].shape == (VOCAB_SIZE, 64)
    raw = np.frombuffer((tmp_path / "model.safetensors").read_bytes(), np.uint8)
    tensor = tensors["model.layers.0.self_attn.o_proj.weight"]
    weights = (raw[tensor.begin : tensor.end].view("<u2").astype(np.uint32) << 16).view(np.float32)
    assert 0.018 < float(weights.std()) < 0.022


def test_latency_prints_one_record_per_workload_and_repetition() -> None:
    records = bench("latency", "--reps", "2", "--round", "1", "--tries", "1")
    assert [(record["workload"], record["rep"]) for record in records] == [
        ("lat1", 0),
        ("long", 0),
        ("lat1", 1),
        ("long", 1),
    ]
    record = records[0]
    assert set(record) == {
        "cpu",
        *("engine", "version", "dtype", "workload", "requests", "in_tok", "out_tok", "ok", "wall_s", "out_tok_s"),
        *("total_tok_s", "ttft_ms", "tpot_ms", "threads", "round", "rep", "peak_rss_mb", "pss_mb", "cpu_s"),
        *("foreign_cpu_s", "steal_s", "noisy", "ready_s", "start_to_first_token_s"),
    }
    assert (record["ok"], record["in_tok"], record["out_tok"], record["round"]) == (True, 128, 128, 1)


def test_throughput_runs_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "requests": [{"prompt": [20, 21], "max_tokens": 3}]}')
    records = bench("throughput", "--only", "prefix,host256", "--workload", str(path), "--tries", "1")
    assert [(record["workload"], record["ok"], record["out_tok"]) for record in records] == [
        ("prefix", True, 512),
        ("mine", True, 3),
        ("host256", True, 32_768),
    ]


def test_startup_measures_a_fresh_process() -> None:
    (record,) = bench("startup", "--tries", "1")
    assert record["workload"] == "startup"
    assert 0 < float(str(record["import_s"])) <= float(str(record["ready_s"]))
    assert "load model" in str(record["phases"])


def test_startup_parts_and_an_empty_kernel_cache(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = EngineConfig(model=str(tmp_path), load_format="safetensors", cpu_kernels="torch")
    assert has_parts(config)
    with kernel_cache(is_filled=False) as environment:
        assert os.listdir(environment["XDG_CACHE_HOME"]) == []
        parts = measure_parts(config, environment)
    assert list(parts) == [
        *("python", "tokenizer", "import ours", "map", "dequantize", "pack", "kv cache"),
    ]
    assert parts["import ours"].cpu_s > 0
    with kernel_cache(is_filled=True) as environment:
        assert environment == dict(os.environ)


def run_small(
    which: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, object]]:
    """Run the benchmark in this process, with a hundredth of the work."""
    for name, value in {"_NUM_TOKENS": 20, "_NUM_FIRST_TOKENS": 20, "_WARM_UP": 2}.items():
        monkeypatch.setattr(ipc, name, value)
    for name, value in {"BATCHES": (1, 4), "_NUM_PAIRS": 2, "_STEPS_PER_ROUND": 5, "_TOKENS_PER_ROUND": 5}.items():
        monkeypatch.setattr(capture_cost, name, value)
        monkeypatch.setattr(metrics_cost, name, value, raising=False)
    monkeypatch.setattr(metrics_cost, "_STEPS", 5)
    assert main([which, "--quiet-seconds", "0"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_ipc_measures_first_tokens_and_streams(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wakeups, *records = run_small("ipc", monkeypatch, capsys)
    assert wakeups["workload"] == "ipc wake-ups"
    for us in dict(wakeups["us"]).values():  # type: ignore[call-overload]
        assert us["awake"] > 0
        assert us["idle"] > 0
    assert [(record["workload"], record["connections"], record["client"]) for record in records] == [
        ("ipc first token", 1, "socket"),
        ("ipc tokens", 1, "socket"),
        ("ipc first token", 64, "socket"),
        ("ipc tokens", 64, "socket"),
        ("ipc first token", 1, "EngineClient"),
    ]
    for record in records:
        if record["workload"] == "ipc tokens":
            assert (record["out_tok"], int(str(record["out_tok_s"])) > 0) == (64 * 20, True)
        else:
            assert set(record["us"]) == set(record["step_us"]) == {"mean", "p50", "p99"}  # type: ignore[call-overload]


def test_capture_compares_turn_about(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    records = run_small("capture", monkeypatch, capsys)
    assert [(record["workload"], record.get("batch")) for record in records] == [
        ("capture steps", 1),
        ("capture steps", 4),
        ("capture tokens", None),
    ]
    for record in records:
        assert float(str(record["ratio"])) > 0
        assert record["pairs"] == 2


def test_metrics_compares_turn_about(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    records = run_small("metrics", monkeypatch, capsys)
    assert [(record["workload"], record.get("batch")) for record in records] == [
        ("metrics steps", 1),
        ("metrics steps", 4),
        ("metrics tokens", None),
    ]
    assert float(str(records[2]["ratio"])) > 0
    assert all(float(str(record["steady_step_us"])) > 0 for record in records[:2])


@pytest.mark.parametrize("which", ["startup", "ipc", "capture", "metrics"])
def test_an_engine_of_its_own_takes_no_workload(which: str) -> None:
    with pytest.raises(ConfigError, match=f"{which} starts its own engine and has no workload"):
        main([which, "--only", "lat1"])


def test_summaries() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([7.0], 0.99) == 7.0
    assert summary_ms([0.001, 0.003]) == {"mean": 2.0, "p50": 2.0, "p99": 2.98}
    assert summary_ms([]) is None
    assert is_clean(0.039, 1.0)
    assert not is_clean(0.041, 1.0)


def test_cpu_time_of_others_is_told_from_ours() -> None:
    """A child counts as ours while it runs and after it has ended."""
    before = quiet.cpu_use()
    begin = time.monotonic()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        assert child.pid in quiet.process_tree()
    after = quiet.cpu_use()
    assert after.ours - before.ours >= 0.28
    # Ticks of 10 ms are rounded per process.
    most = (time.monotonic() - begin) * (os.cpu_count() or 1) - 0.3
    assert 0 <= quiet.foreign_cpu(before, after) <= most + 0.1


def test_memory_and_age_of_this_process() -> None:
    memory = quiet.memory_mb()
    assert memory["peak_rss_mb"] >= memory["pss_mb"] > 5
    assert quiet.seconds_since_process_start() > 0


def test_gemm_measures_every_product_by_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_SECONDS", 0.0)
    monkeypatch.setattr(gemm, "_COPIES_BYTES", 1)
    monkeypatch.setattr(gemm, "_READ_SECONDS", 0.0)
    monkeypatch.setattr(gemm, "_READ_BYTES", 4 << 20)
    write_tiny_model(tmp_path)
    threads = torch.get_num_threads()
    try:
        read, *records = gemm.measure_gemm(EngineConfig(model=str(tmp_path), threads=1), (1, 40), rep=0)
    finally:
        torch.set_num_threads(threads)
    name = f"c-{usable_variants()[0]}"
    kernels = [name, f"{name}-int8", *gemm.torch_kernels(BFLOAT16)]
    assert kernels[-1] == "linear"
    products = ["qkv", "o", "gate_up", "down", "head", "all"]
    assert {(record["kernel"], record["product"], record["rows"]) for record in records} == {
        (kernel, product, rows) for kernel in kernels for product in products for rows in (1, 40)
    }
    assert all(record["us"] > 0 for record in (read, *records))
    assert read["kernel"] == "read"
    assert read["gb_s"] == pytest.approx((4 << 20) / read["us"] / 1e3, rel=0.02)
    assert {tuple(record["shape"]) for record in records if record["shape"]} == {
        (128, 64),
        (64, 64),
        (256, 64),
        (64, 128),
        (VOCAB_SIZE, 64),
    }
    with pytest.raises(SystemExit):
        main(["gemm", "--rows", "1,x"])


def test_gpu_kernels_are_measured_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Triton's interpreter, whose times mean nothing: what is called, and what is told of it."""
    ran = []

    def run_once(run: Callable[[], object]) -> float:
        ran.append(run())
        return 1e-3

    monkeypatch.setattr(gpu_kernels, "seconds", run_once)
    shapes = gpu_kernels.Shapes(
        4, 2, 16, 32, 64, 50, ((2, 40),), ((1, 20),), (3,), ExpertShape(5, 2, 32, 24, (4,)), 1 << 10, 16
    )
    records = list(gpu_kernels.measure_gpu_kernels(EngineConfig(dtype="float32", device="cuda"), 0, shapes))
    assert len(ran) == 2 + 2 * len(records)
    decode, prefill, *rest = (one for one in records if "product " not in one["kernel"])  # see test_gpu_products.py
    assert (decode["kernel"], decode["shape"], decode["us"]) == ("attention decode", "2x40", 1000)
    assert decode["gb_s"] == pytest.approx((2 * 2 * 40 * 2 + 2 * 2 * 4) * 16 * 4 / 1e-3 / 1e9, abs=0.01)
    assert (prefill["kernel"], prefill["gflop_s"]) == ("attention prefill", round(4 * 210 * 4 * 16 / 1e-3 / 1e9, 1))
    names = ["norm after addition", "silu * up", "rope and cache write"]
    draws = "plain", "top_k 50", "top_p 0.9 of 50 tokens", "top_p 0.9 of thousands"
    samplers = [f"sampler {name}" for name in ("greedy", *draws)]
    assert [record["kernel"] for record in rest] == [*names, "routed MLP", *samplers]
    mlp = rest[len(names)]
    assert (mlp["shape"], mlp["torch"]) == ("4x5x24", "linear, index_add")
    assert mlp["gflop_s"] == round(2 * 4 * 32 * (2 * 3 * 24 + 5) / 1e-3 / 1e9, 1)


def test_flash_attention_of_any_torch_is_called_as_it_wants() -> None:
    assert gpu_kernels.gqa_option(lambda query, *, window_size=(-1, -1): None) == {}
    assert gpu_kernels.gqa_option(lambda query, *, enable_gqa=False: None) == {"enable_gqa": True}
    bound = inspect.signature(gpu_kernels.varlen_attn).bind(*range(7), window_size=(-1, 0))
    assert list(bound.arguments)[3:7] == ["cu_seq_q", "cu_seq_k", "max_q", "max_k"]


def test_gpu_kernels_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> torch.device:
        raise NoDeviceError("there is none")

    monkeypatch.setattr(device, "find_device", none)
    with pytest.raises(ConfigError, match="device=cuda needs an NVIDIA GPU: there is none"):
        next(gpu_kernels.measure_gpu_kernels(EngineConfig(device="cuda"), rep=0))


def test_kernels_are_measured_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SECONDS", 0.0)
    monkeypatch.setattr(kernels, "_BATCHES", (("prefill", 1, 40, 40), ("decode", 2, 40, 1)))
    before = torch.get_num_threads()
    try:
        records = list(kernels.measure_kernels(EngineConfig(threads=1), rep=0))
    finally:
        torch.set_num_threads(before)
    names = {record["kernel"] for record in records}
    assert {
        "attention prefill",
        "attention decode",
        "norm after addition",
        "rope and cache write",
    } <= names
    assert all(record["us"] > 0 and record["torch_us"] > 0 and record["gb_s"] > 0 for record in records)
    with pytest.raises(ConfigError, match="which are not available here"):
        next(kernels.measure_kernels(EngineConfig(cpu_kernels="torch"), rep=0))


def test_structured_outputs_are_measured_beside_free_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in {"_ROWS": 2, "_STEPS": 2, "_TURNS": 1, "ID_LOW": 10, "ID_SPAN": 200}.items():
        monkeypatch.setattr(structured, name, count)
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": grammar_vocabulary.EOS}))
    for name, content in grammar_vocabulary.tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    before = torch.get_num_threads()
    try:
        first, forced, *steps = structured.measure_structured(EngineConfig(model=str(tmp_path), threads=1), rep=0)
    finally:
        torch.set_num_threads(before)
    assert first["first_ms"] > first["later_ms"] > 0
    assert [(record["batch"], record["temperature"]) for record in steps] == [(2, 0.0), (2, 1.0)]
    assert all(record["ratio"] > 0 for record in steps)
    assert forced["tokens"] == forced["tokens_without"]
    assert forced["steps"] < forced["steps_without"]


@pytest.mark.parametrize("cpu_kernels", ["c", "torch"])
def test_step_is_split_into_its_parts(cpu_kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "SIZES", (1, 3))
    monkeypatch.setattr(step, "_STEPS", 3)
    write_tiny_model(tmp_path)
    before = torch.get_num_threads()
    try:
        records = list(step.measure_step(EngineConfig(model=str(tmp_path), threads=1, cpu_kernels=cpu_kernels), rep=0))
    finally:
        torch.set_num_threads(before)
    assert [record["batch"] for record in records] == [1, 3]
    operations = {"input_norm", "qkv", "attention", "o", "mlp_norm", "gate_up", "down", "head"}
    operations |= {"rope"} if cpu_kernels == "c" else {"activation"}  # C's product of gate and up has it
    for record in records:
        parts = [record[f"{name}_us"] for name in ("schedule", "prepare", "forward", "sample", "update", "encode")]
        assert min(parts) > 0
        assert set(record["operations_us"]) == operations
