"""Architectures with routed MLPs by the Triton kernels, from files: the logits are near those of torch's operations."""

from pathlib import Path

import pytest
import torch

from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.models.device_model import device_model
from kernels.elements import FLOAT32
from tests.core.executors.test_cuda_architectures import OnDevice
from tests.core.models.checkpoints import CASES, build, our_logits
from tests.core.models.gguf_checkpoints import GGUF_CASES, write_model
from tests.core.models.test_llama import Requests, prompts
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = [*ANYWHERE, pytest.mark.filterwarnings("ignore")]  # of transformers and what it imports

#: Every way to choose experts, and a shared one with a gate and without. test_architectures_cuda.py has the others.
SOME = ("qwen3-moe", "qwen2-moe", "glm4-moe", "ernie4.5-moe", "gpt-oss")
#: From a GGUF file, where all experts are one tensor; the others are from safetensors.
FROM_GGUF = ("qwen2-moe", "ernie4.5-moe")


@pytest.mark.parametrize("case", SOME)
def test_architectures_with_routed_mlps(case: str, tmp_path: Path) -> None:
    model = build(case)
    assert CASES[case][0] == model.config.model_type
    path = tmp_path
    if case in FROM_GGUF:
        path = write_model(tmp_path / "model.gguf", model, GGUF_CASES[case])
    else:
        model.save_pretrained(path)
    config = read_model_config(path)
    ids = prompts(7, 21, vocab_size=config.vocab_size)
    on_device = device_model(config, load_weights(path, config, FLOAT32), FLOAT32, DEVICE)
    requests = Requests(OnDevice(on_device), ids)
    parts = [requests.step(counts) for counts in ({0: 6, 1: 20}, {0: 1, 1: 1})]
    for number, expected in enumerate(our_logits(path, ids)):
        got = torch.cat([part[number] for part in parts])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)
