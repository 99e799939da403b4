"""The routed MLPs of `bench kernels --device cuda`: torch's, in both ways, does the work of ours."""

from functools import partial

import pytest
import torch

from tests.triton_device import ANYWHERE, DEVICE, ON_GPU
from tools.lab.bench.gpu.gpu_kernels import ExpertShape, TorchMlp, expert_cases

pytestmark = ANYWHERE


@pytest.mark.parametrize("name", ["grouped", "looped"])
def test_torchs_routed_mlp_does_the_same_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU and name == "grouped":
        pytest.skip("torch has no grouped product of float32 on a GPU")
    monkeypatch.setattr(TorchMlp, "best", lambda self, x: (name, partial(getattr(self, name), x)))
    for case in expert_cases(ExpertShape(5, 2, 32, 24, (1, 7)), DEVICE, torch.float32):
        torch.testing.assert_close(case.run(), case.torch_run(), rtol=1e-4, atol=1e-4)
        tokens = int(case.shape.split("x")[0])
        fewest, most = 2, min(5, 2 * tokens)
        others = 5 * 32 + 2 * tokens * 32
        assert fewest * 3 * 32 * 24 + others <= case.num_bytes / 4 <= most * 3 * 32 * 24 + others
