"""Every in-tree architecture on a GPU against transformers: minutes long under Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.models.device_model import device_model
from kernels.elements import FLOAT32
from tests.core.executors.test_cuda_architectures import OnDevice
from tests.core.models.checkpoints import CASES, golden
from tests.core.models.test_llama import Requests
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = [*ANYWHERE, pytest.mark.soak, pytest.mark.filterwarnings("ignore")]  # of transformers


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """The error against float64 is at most four times transformers' own in float32."""
    expected = golden(case)
    expected.model.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    weights = load_weights(tmp_path, config, FLOAT32)
    model = device_model(config, weights, FLOAT32, DEVICE)
    prompts = expected.prompts[:2]
    requests = Requests(OnDevice(model), prompts)
    steps = [requests.step(counts) for counts in ({0: 5, 1: 37}, {1: 1}, {1: 22})]
    ours = [steps[0][0], torch.cat([step[1] for step in steps])]
    for logits, exact, errors in zip(ours, expected.exact, expected.errors, strict=False):
        assert (logits - exact).abs().max() <= 4 * errors.max()
