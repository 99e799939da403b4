"""Hidden states of a step, behind the final norm, are transformers' last_hidden_state, whatever path runs the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.model_files.loading import load_model
from kernels.elements import FLOAT32
from tests.core.models.test_llama import Requests
from tests.core.models.transformers.test_transformers_model import VOCAB, config_for, save

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

PATHS: dict[str, dict[str, Any]] = {
    "one C call": {"model_impl": "native", "cpu_kernels": "c"},
    "operations of the C kernels": {"model_impl": "native", "cpu_kernels": "c"},
    "operations of torch": {"model_impl": "native", "cpu_kernels": "torch"},
    "transformers": {"model_impl": "transformers"},
}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("path", PATHS)
def test_hidden_states_are_those_of_transformers(path: str, model_type: str, tmp_path: Path) -> None:
    """Hidden states of tokens with and without logits, in any order, before and after other logits are requested."""
    changes = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    theirs = save(model_type, tmp_path, **changes)
    ids = np.random.default_rng(1).integers(3, VOCAB, 40)
    with torch.inference_mode():
        expected = theirs.get_decoder()(torch.from_numpy(ids)[None], use_cache=False).last_hidden_state[0]
    model: Any = load_model(tmp_path, FLOAT32, config_for(tmp_path, **PATHS[path])).model
    if path == "operations of the C kernels":
        model.decoder = None
    requests = Requests(model, [ids])
    for begin, end in ((0, 25), (25, 26), (26, 40)):
        logits = requests.step({0: end - begin})[0]
        rows = np.arange(end - begin)[::-2].copy()
        found = torch.from_numpy(requests.result.hidden_of(rows))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected[begin + rows], rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(
            torch.from_numpy(requests.result.logits_of(rows)), logits[rows], rtol=1e-4, atol=1e-4
        )
        assert np.array_equal(requests.result.hidden_of(rows), found)
