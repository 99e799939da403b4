"""`kv_cache_dtype`: what it chooses, what it refuses, and what the demo model's predictions lose by 8 bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.model_files.loading import load_model
from core.models.llama import Llama
from frontend.text.tokenizer import Tokenizer
from ipc.errors import ConfigError
from ipc.files.model_files import read_tokenizer_files, resolve_model
from ipc.options.config import EngineConfig
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.quantized_kv_cache import QuantizedKVCache
from kernels.elements import BFLOAT16, Numbers
from tests.core.models.test_llama import Requests
from tools.lab.bench.tiny_model import write_tiny_model

#: Prose that does not change with a page.
TEXT = """# engine-core

**One request, one answer.** engine-core is an LLM inference engine that runs in its own process, on CPUs and NVIDIA
GPUs. It batches continuously, caches prefixes and preempts by priority. A request's tokens depend on the request
alone: not on its neighbours, on how its prompt was split, on preemption or on the cache. They are the same bit for
bit, in float32 and bfloat16, on each CPU. The engine's *fingerprint* names model, kernels and arithmetic; equal
fingerprints give equal tokens. Other kernels (AVX2, AVX-512) may give others. On a GPU this does not hold yet.

- **Fast.** 1.4 to 2.2 times the best of llama.cpp, OpenVINO and vLLM on two cores with AVX-512 ([figures](#figures)).
- **Replayable.** A recorded run replays decision by decision and token by token. `--what-if` predicts how it would
  have run with other options. A crash leaves a file that replays the last minutes and contains no prompts.
- **Robust.** A bad request fails alone, with an error that says what would be right. A dead engine restarts and every
  stream continues at its next token. A client that dies or does not read harms no other client.
- **Small.** No torch, no CUDA, no web framework. With a wheel, no compiler.
"""


def loaded(folder: Path, **options: Any) -> Any:
    config = EngineConfig(model=str(folder), threads=1, **options)
    return load_model(folder, BFLOAT16, config).model


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cpu_kernels": "torch"}, "needs the C kernels at numerics level L2"),
        ({"numerics": "L0"}, "needs the C kernels at numerics level L2"),
        ({"kv_cache_dtype": "fp8"}, "'fp8' needs device='cuda': use 'int8' on a CPU"),
        ({"model_impl": "transformers"}, "'int8' needs a decoder of our own, and .* needs transformers' code"),
    ],
)
def test_where_it_cannot_be_had_it_is_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=text):
        loaded(tmp_path, **{"kv_cache_dtype": "int8", **options})


def test_the_option_reaches_the_cache(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    for value, kind in (("auto", CpuKVCache), ("int8", QuantizedKVCache)):
        model = loaded(tmp_path, kv_cache_dtype=value)
        assert type(model.allocate_cache(3, 16)) is kind
        assert (" kv=int8" in model.variant) == (value == "int8")


def log_probabilities(model: Llama, ids: Numbers) -> Numbers:
    """[tokens, vocab] of a prompt that is computed in three chunks."""
    requests, third = Requests(model, [ids]), len(ids) // 3
    logits = np.concatenate([requests.step({0: third})[0].numpy() for _ in range(3)]).astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    predicted: Numbers = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return predicted


def test_the_demo_models_predictions_are_nearly_those_of_a_whole_cache() -> None:
    path = resolve_model(None)
    ids = np.array(Tokenizer.from_files(read_tokenizer_files(path)).encode(TEXT)[:192])
    usual, mine = (log_probabilities(loaded(path, kv_cache_dtype=value), ids) for value in ("auto", "int8"))
    divergence = (np.exp(usual) * (usual - mine)).sum(1)
    assert 0 < divergence.mean() < 0.003
    surprise = [-each[np.arange(len(ids) - 1), ids[1:]].mean() for each in (usual, mine)]
    assert abs(surprise[1] - surprise[0]) < 0.02
