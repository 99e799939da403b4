"""Goldens of the demo model in bfloat16 on a GPU: 32 tokens, and the bits of the logits that they follow from.

All arithmetic of such a model is defined (kernels/triton/arithmetic), so a GPU must give these bits too. At numerics
level L2 it does not matter how tokens are divided into steps: here the prompt and the beginning of its answer are one.
"""

import zlib
from typing import Any

import numpy as np
import pytest
import torch

from core.model_files.load_format import open_weights
from core.model_files.model_config import read_model_config
from core.models.device_model import device_model
from core.models.llama import Llama
from ipc.files.model_files import resolve_model
from kernels.elements import BFLOAT16
from kernels.triton import gated_activation, ordered_product
from tests.core.executors.test_cuda_architectures import OnDevice
from tests.core.models.test_llama import Requests
from tests.kernels.triton.tensor_core import HOPPER
from tests.kernels.triton.test_demo_products import PROMPT, emulated
from tests.triton_device import ANYWHERE, DEVICE, ON_GPU

pytestmark = ANYWHERE

# fmt: off
TOKENS = (
    7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33, 34, 42,
    37, 35, 30, 2, 198, 1,
)
# fmt: on
#: Of the logits of the first tokens, with tensor cores that add 16 neighbours of K.
DIGESTS = {8: 3668248129, 32: 1917000100}


def demo() -> Llama:
    path = resolve_model(None)
    config = read_model_config(path)
    return device_model(config, open_weights("auto", path, config, BFLOAT16).tensors, BFLOAT16, DEVICE)


def logits(model: Llama, *counts: int) -> torch.Tensor:
    """Return those from which the tokens follow, of steps of so many tokens each."""
    requests = Requests(OnDevice(model), [np.array([*PROMPT, *TOKENS[:-1]])])
    return torch.cat([requests.step({0: count})[0] for count in counts])[len(PROMPT) - 1 :]


def check(found: torch.Tensor) -> None:
    assert tuple(found.argmax(1).tolist()) == TOKENS[: len(found)]
    assert zlib.crc32(found.cpu().numpy().tobytes()) == DIGESTS[len(found)]


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, _: Any, function: str = ""
) -> torch.Tensor:
    """The product without the interpreter, which takes its time to load each weight. Other tests compare them."""
    assert bias is None
    sums = emulated(x, weight, HOPPER)
    if not function:
        return out.copy_(sums)
    assert function == "silu"
    return out.copy_(gated_activation.silu_mul(sums.to(x.dtype)))


@pytest.mark.parametrize("num_tokens", [8, pytest.param(32, marks=pytest.mark.soak)])
def test_the_tokens_are_the_goldens(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("its tensor cores add 8 neighbours of K")
    if not ON_GPU:
        monkeypatch.setattr(ordered_product, "_run", product)
    check(logits(demo(), len(PROMPT) + num_tokens - 1))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_kernels_of_products_give_the_goldens_step_by_step() -> None:
    check(logits(demo(), len(PROMPT), *[1] * 7))
