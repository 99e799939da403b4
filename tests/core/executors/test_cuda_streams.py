"""Gemma 3n on a GPU: a checkpoint that loads, logits near the C kernels', and bits that neither pieces nor company
change."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from core.model_files.loading import load_model
from core.models.llama import Llama
from ipc.options.config import EngineConfig
from kernels.elements import BFLOAT16, FLOAT32
from tests.core.executors.test_cuda_architectures import VOCAB, OnDevice
from tests.core.executors.test_cuda_invariance import model
from tests.core.models.checkpoints import build, our_logits
from tests.core.models.test_llama import Requests, prompts
from tests.triton_device import ANYWHERE

pytestmark = ANYWHERE


def test_no_bit_differs_in_pieces_and_in_company() -> None:
    """Short prompts, because attention has tests of its own; those of a split are in the soak of all architectures."""
    one = model("gemma3n", BFLOAT16)
    given = prompts(7, 5, vocab_size=VOCAB)
    alone = Requests(one, given[:1]).step({0: 7})[0]
    company = Requests(one, given, seed=1)
    others = torch.cat([company.step(counts)[0] for counts in ({0: 1}, {1: 3, 0: 4}, {0: 2, 1: 1})])
    assert alone.isfinite().all()
    assert torch.equal(alone.view(torch.int32), others.view(torch.int32))


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_checkpoint_loads_and_its_logits_are_near(tmp_path: Path) -> None:
    """Four streams, sparse gates, shared K and V, tokens without inputs of their own."""
    build("gemma3n").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], 6)
    ids[3] = config["vocab_size_per_layer_input"] + 1
    loaded = load_model(tmp_path, FLOAT32, EngineConfig(model=str(tmp_path), device="cuda"))
    assert isinstance(loaded.model, Llama)
    assert loaded.model.numerics == "L2"
    found = Requests(OnDevice(loaded.model), [ids]).step({0: len(ids)})[0]
    torch.testing.assert_close(found, our_logits(tmp_path, [ids])[0], rtol=1e-4, atol=1e-4)
