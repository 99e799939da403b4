"""Longrope: the factors are fixed by max_model_len, and known to the fingerprint."""

from pathlib import Path

import numpy as np
import pytest
import torch

from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.models.layers.rope_scaling import LongropeScaling
from core.models.layers.rotary import rotary_embeddings
from core.models.llama import Llama
from ipc.files.model_files import resolve_model
from kernels.cpu.library import load_cpu_library
from kernels.elements import FLOAT32
from tests.core.models.checkpoints import golden
from tests.core.models.test_llama import Requests

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports


def test_the_length_chooses_the_factors_of_every_request(tmp_path: Path) -> None:
    """A prompt of 4 tokens has other logits with the long factors."""
    expected = golden("phi4-mini")
    expected.model.save_pretrained(tmp_path)
    config, prompt = read_model_config(tmp_path), expected.prompts[1][:4]
    assert isinstance(config.rope_scaling, LongropeScaling)
    with torch.inference_mode():
        short = expected.model(torch.from_numpy(prompt)[None]).logits[0].numpy()
    for library in (load_cpu_library(), None):
        logits, variants = [], []
        for length in (4, 5):
            model = Llama(config, load_weights(tmp_path, config, FLOAT32), FLOAT32, library=library)
            assert "longrope=long" in model.variant
            model.settle_length(length)
            logits.append(Requests(model, [prompt]).step({0: 4})[0].numpy())
            variants.append(model.variant)
        assert np.abs(logits[0] - short).max() < 1e-4
        assert np.abs(logits[1] - short).max() > 1e-2
        assert "longrope=short" in variants[0] != variants[1]


def test_numbers_that_are_not_rotated_have_the_frequency_0_and_no_factor() -> None:
    config = read_model_config(resolve_model(None))
    config = type(config)(
        **{
            **{name: getattr(config, name) for name in config.__struct_fields__},
            "rotary_dim": config.head_dim // 2,
            "rope_scaling": LongropeScaling((1.0,) * 16, (2.0,) * 16, 64.0, 1.5),
        }
    )
    (rotary,) = rotary_embeddings(config, 64)
    assert np.count_nonzero(rotary.frequencies) == config.head_dim // 4
    (long,) = rotary_embeddings(config, 65)
    assert np.array_equal(long.frequencies * 2, rotary.frequencies)
    assert rotary.factor == 1.5
