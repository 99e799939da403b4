"""The demo model's float32 greedy tokens equal transformers', from GGUF and from safetensors (data/make_golden.py)."""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from core.engine import EngineCore
from core.executors.local import LocalExecutor
from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.process.resolve import resolve
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.options.model_options import CpuKernels
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Outputs
from kernels.elements import FLOAT32
from tests.numbers import dense_tensor

DATA = Path(__file__).parents[2] / "data"
GOLDEN: list[dict[str, Any]] = json.loads((DATA / "golden_smollm2.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def safetensors_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model's weights as a Hugging Face folder in float32."""
    folder = tmp_path_factory.mktemp("model")
    source = resolve_model(None)
    config = read_model_config(source)
    save_file(
        {name: dense_tensor(weight).clone() for name, weight in load_weights(source, config, FLOAT32)},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": config.num_hidden_layers,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.num_key_value_heads,
                "rms_norm_eps": config.rms_norm_eps,
                "rope_theta": config.rope_theta,
                "max_position_embeddings": config.max_position_embeddings,
                "tie_word_embeddings": config.tie_word_embeddings,
                "hidden_act": "silu",
                "bos_token_id": config.bos_token_id,
                "eos_token_id": list(config.eos_token_ids),
                "dtype": "float32",
            }
        )
    )
    yield folder
    shutil.rmtree(folder)


def generate(model: Path, prompts: list[list[int]], count: int, cpu_kernels: CpuKernels = "auto") -> list[list[int]]:
    """Greedy float32 tokens of all prompts at once, by the engine and the local executor in this process."""
    config = EngineConfig(
        model=str(model),
        dtype="float32",
        threads=1,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=256 << 20,
        cpu_kernels=cpu_kernels,
    )
    executor = LocalExecutor(config)
    config = resolve(
        config, executor.info, executor.determine_num_available_blocks, total_memory_bytes=1 << 30, num_cpus=1
    )
    executor.initialize_cache(config)
    engine = EngineCore(config, executor)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    inbox = [(0, AddRequest(i, np.array(ids, "<i4").tobytes(), params, seed=i)) for i, ids in enumerate(prompts)]
    tokens: list[list[int]] = [[] for _ in prompts]
    while inbox or engine.has_work:
        for _, message in engine.step(inbox, 0):
            assert isinstance(message, Outputs), message
            numbers, values = np.frombuffer(message.numbers, "<u4"), np.frombuffer(message.tokens, "<i4")
            for number, token in zip(numbers.tolist(), values.tolist(), strict=True):
                tokens[number].append(token)
        inbox = []
    return tokens


@pytest.mark.parametrize(
    ("source", "cpu_kernels", "count"),  # torch's path takes three times as long: the soak has the long prompt, too
    [
        ("gguf", "c", 20),
        ("safetensors", "torch", 5),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("gguf", "c", 48), ("safetensors", "torch", 12))),
    ],
)
def test_greedy_tokens_equal_transformers(
    source: str, cpu_kernels: CpuKernels, count: int, request: pytest.FixtureRequest
) -> None:
    model = resolve_model(None) if source == "gguf" else request.getfixturevalue("safetensors_folder")
    rows = [row for row in GOLDEN if len(row["prompt_token_ids"]) < 300 or (cpu_kernels, count) != ("torch", 5)]
    tokens = generate(model, [row["prompt_token_ids"] for row in rows], count, cpu_kernels)
    for row, got in zip(rows, tokens, strict=True):
        assert got == row["token_ids"][:count], f"{row['name']}: {got} instead of {row['token_ids'][:count]}"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.soak  # 20 s; the suite reads the same weights as transformers in model_files/test_weights.py
@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
def test_the_stored_golden_is_what_transformers_says_now() -> None:
    make_golden = load_generator()
    model, _ = make_golden.load_oracle()
    row = next(row for row in GOLDEN if row["name"] == "numbers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert make_golden.greedy(model, row["prompt_token_ids"], 16) == row["token_ids"][:16]
    finally:
        torch.set_num_threads(threads)
