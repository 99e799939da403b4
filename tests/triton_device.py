"""The device of the Triton kernels' tests: the interpreter, or a GPU (`make gpu` sets TRITON_INTERPRET=0)."""

import pytest
import torch

from kernels.triton.device import INTERPRETED, NoDeviceError, find_device
from tests.interpreter.quick import quicken
from tests.kernels.triton import tensor_core

if INTERPRETED:
    quicken()
    tensor_core.install()


def _found() -> torch.device | None:
    try:
        return find_device()
    except NoDeviceError:
        return None


#: None: TRITON_INTERPRET=0 and no GPU.
_DEVICE = _found()
DEVICE = _DEVICE or torch.device("cpu")
ON_GPU = DEVICE.type == "cuda"

_SKIP = pytest.mark.skipif(_DEVICE is None, reason="TRITON_INTERPRET=0, and there is no GPU")
#: pytestmark of what runs in both places, and of what only a GPU can.
ANYWHERE = [_SKIP] if INTERPRETED else [_SKIP, pytest.mark.gpu]
GPU_ONLY = [pytest.mark.skipif(not ON_GPU, reason="needs a GPU and TRITON_INTERPRET=0"), pytest.mark.gpu]
