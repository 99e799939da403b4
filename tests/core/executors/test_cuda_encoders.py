"""Models whose tokens see whole prompts on a GPU: vectors of the C kernels, and bits that no other prompt changes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from core.executors.cuda import CudaExecutor
from core.executors.local import LocalExecutor
from core.runner import cuda_model_runner
from ipc.errors import ConfigError, UnsupportedModelError
from ipc.options.config import EngineConfig
from ipc.tables.arrays import AnyInts, Int32s
from ipc.wire.lora_messages import AdapterId
from tests.core.adapters.peft_files import random_matrices, write_peft
from tests.core.executors.test_cuda_pooling import PROMPTS, vectors
from tests.triton_device import ANYWHERE

pytestmark = ANYWHERE

_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 120,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
#: Settings that differ in what an encoder's layers are made of.
FOLDERS: dict[str, dict[str, Any]] = {
    "tables, and norms behind layers": {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu_new"},
    "positions behind the padding token": {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"},
    "windows, and gates of gelu": {
        "architectures": ["ModernBertModel"],
        "model_type": "modernbert",
        "layer_types": ["full_attention", "sliding_attention"],
        "local_attention": 8,
    },
    "rotation, and gates of silu": {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "rope_theta": 1000.0,
    },
    "a decoder": {
        "architectures": ["Gemma3TextModel"],
        "model_type": "gemma3_text",
        "use_bidirectional_attention": True,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
    },
    "two sizes of heads, and inputs of single layers": {
        "architectures": ["EmbeddingGemma2TextModel"],
        "model_type": "embedding_gemma2_text",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 24,
        "embedding_dim": 20,
        "rms_norm_eps": 1e-6,
    },
}


def config_of(folder: Path, kind: str, device: str = "cuda", **options: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(_SIZES | FOLDERS[kind]))
    shape: dict[str, Any] = {"load_format": "dummy", "runner": "pooling", "dtype": "float32", "max_num_seqs": 3}
    return EngineConfig(model=str(folder), device=device, threads=1, **shape, **options)


@pytest.mark.parametrize("kind", FOLDERS)
def test_vectors_are_those_of_the_c_kernels_and_of_the_prompt_alone(kind: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, kind, async_scheduling=True)
    executor = CudaExecutor(config)
    assert (executor.info.is_encoder, executor.info.numerics) == (True, "L2")
    together = vectors(executor, config, [0, 1, 2])
    assert [len(together[number]) for number in range(3)] == [1, len(PROMPTS[1]), 1]
    for number in range(3):
        (alone,) = vectors(executor, config, [number]).values()
        assert np.array_equal(alone, together[number])
    on_cpu = config_of(tmp_path, kind, "cpu")
    for number, expected in vectors(LocalExecutor(on_cpu), on_cpu, [0, 1, 2]).items():
        np.testing.assert_allclose(together[number], expected, rtol=0, atol=2e-5)


def test_all_tokens_of_a_prompt_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are others if tokens see themselves and those before only."""
    config = config_of(tmp_path, "a decoder")
    executor = CudaExecutor(config)
    seen = vectors(executor, config, [0])[0]

    def none_later(positions: AnyInts, _: AnyInts) -> Int32s:
        return positions.astype(np.int32)

    monkeypatch.setattr(cuda_model_runner, "last_seen", none_later)
    assert np.abs(vectors(executor, config, [0])[0] - seen).max() > 1e-3


def test_adapters_change_products_and_no_tables(tmp_path: Path) -> None:
    kind, matrix = "tables, and norms behind layers", "encoder.layer.1.attention.self.value"
    adapter = write_peft(tmp_path / "a", random_matrices({matrix: (48, 48)}, 4, 1, ("value",), size=5), rank=4, alpha=8)
    options: dict[str, Any] = {"enable_lora": True, "lora_modules": {"a": str(adapter)}}
    found = []
    for device, executor_of in (("cuda", CudaExecutor), ("cpu", LocalExecutor)):
        config = config_of(tmp_path, kind, device, **options)
        executor = executor_of(config)
        assert executor.adapters is not None
        own = AdapterId(executor.adapters.list()[0].digest)
        found.append([vectors(executor, config, [0, 2], one) for one in (own, None)])
    for on_gpu, on_cpu in zip(*found, strict=True):
        for number in (0, 2):
            np.testing.assert_allclose(on_gpu[number], on_cpu[number], rtol=0, atol=2e-5)
    (adapted, plain), _ = found
    assert np.abs(adapted[0] - plain[0]).max() > 1e-2
    assert np.array_equal(adapted[2], plain[2])
    name = "base_model.model.embeddings.word_embeddings.lora_embedding_"
    tensors = {f"{name}A": np.ones((4, 120), np.float32), f"{name}B": np.ones((48, 4), np.float32)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match="only with device=cpu"):
        CudaExecutor(config_of(tmp_path, kind, **options))


def test_what_encoders_lack_on_a_cpu_they_lack_here(tmp_path: Path) -> None:
    for options, name in (({"quantization": "int8"}, "quantization"), ({"kv_cache_dtype": "int8"}, "kv_cache_dtype")):
        with pytest.raises(ConfigError, match=f"{name}='int8'"):
            CudaExecutor(config_of(tmp_path, "tables, and norms behind layers", **options))
