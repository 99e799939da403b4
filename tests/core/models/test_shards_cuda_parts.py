"""Models computed by several GPUs whose layers exchange more than products: every bit is that of one GPU. Ranks are
threads here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from core.model_files.draft_head import load_mtp
from core.model_files.model_config import read_model_config
from core.models.config import ExpertParts, LatentParts, ModelConfig, RecurrentParts
from core.models.operations.weight_form import WeightForm
from core.models.parts.rank import Rank
from ipc.tables.arrays import Floats
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from tests.core.executors.test_cuda_architectures import OnDevice, logits, shape_config
from tests.core.models.test_shards_cuda import Adapted, by_ranks, model
from tests.core.workers.part_answers import LATENT
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = ANYWHERE

#: Widths that no number of ranks divides.
_EXPERTS = ExpertParts(num_experts=5, num_chosen=2, intermediate_size=37, normalises=True)
_SHARED = ExpertParts(
    num_experts=4, num_chosen=2, intermediate_size=41, normalises=False, shared_size=23, has_shared_gate=True
)
_LATENT = LatentParts(query_dim=None, latent_dim=64, plain_dim=20, rotated_dim=8, value_dim=32)
_ROWS: dict[str, Any] = {"qk_norm": True, "qk_norm_of_rows": True, "num_attention_heads": 6, "num_key_value_heads": 3}
#: The shape that a model is a layer of, and what differs: the shared expert's gate, biases of experts, inputs that are
#: scaled, groups of experts, experts alongside a dense MLP; norms of rows of heads that are not divided equally;
#: latent attention, with and without the queries' own vector; Gemma 3n's streams.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("llama", {"experts": _SHARED}),
    "biases": ("gpt-oss experts", {"hidden_size": 68}),
    "scaled inputs": ("llama4", {"experts": msgspec.structs.replace(_EXPERTS, scales_inputs=True, is_sigmoid=True)}),
    "groups": ("glm4-moe", {}),
    "alongside": ("gemma4-26b-a4b", {}),
    "rows": ("olmo2", _ROWS),
    "centred rows": ("olmo2", {**_ROWS, "num_key_value_heads": 2, "centred_norms": True}),
    "rows and states": (
        "olmo2",
        {
            **_ROWS,
            "pre_norms": True,
            "recurrent": RecurrentParts(kind="short convolution", layers=(0,), taps=3, channels=50),
        },
    ),
    "latent": ("deepseek-v2-lite", {"latent": _LATENT}),
    "latent queries": ("deepseek-v2", {}),
    "latent heads in the file": (
        "deepseek-v2-lite",
        {"latent": msgspec.structs.replace(_LATENT, query_dim=36, is_split=True), "experts": _EXPERTS},
    ),
    "streams": ("gemma3n", {}),
}
#: Whose parts need several layers.
_DEEP = {"streams": 3, "rows and states": 2, "alongside": 2, "groups": 2, "scaled inputs": 2}


def config_of(kind: str) -> ModelConfig:
    shape, own = MODELS[kind]
    return msgspec.structs.replace(shape_config(shape), **{"num_hidden_layers": _DEEP.get(kind, 1), **own})


def check(
    config: ModelConfig, dtype: Dtype, sizes: Sequence[int], form: WeightForm = WeightForm.DENSE, longest: int = 23
) -> None:
    whole = model(config, dtype, form=form)
    expected = logits(OnDevice(whole), longest)
    assert expected.isfinite().all()
    for size in sizes:

        def run(rank: Rank) -> tuple[str, torch.Tensor, int]:
            own = model(config, dtype, rank, form=form)
            return own.variant, logits(OnDevice(own), longest), own.bytes_per_block(16)

        for variant, found, num_bytes in by_ranks(size, run):
            assert variant == whole.variant, "engines with any number of GPUs continue each other's requests"
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), size
            assert num_bytes <= whole.bytes_per_block(16)


@pytest.mark.parametrize(
    ("kind", "dtype", "sizes"),
    [
        ("experts", BFLOAT16, (2,)),
        ("rows", FLOAT32, (2,)),
        ("latent heads in the file", FLOAT32, (2,)),
        ("streams", FLOAT32, (2,)),
    ],
)
def test_every_bit_is_that_of_one_device(kind: str, dtype: Dtype, sizes: Sequence[int]) -> None:
    check(config_of(kind), dtype, sizes, longest=7)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("kind", MODELS)
def test_every_bit_at_any_size(kind: str, dtype: Dtype) -> None:
    check(config_of(kind), dtype, range(1, 7))


@pytest.mark.soak
@pytest.mark.parametrize("form", [WeightForm.INT8, WeightForm.FP8])
@pytest.mark.parametrize("kind", ["experts", "rows", "latent queries", "streams"])
def test_every_bit_with_packed_weights(kind: str, form: WeightForm) -> None:
    """Whole rows of experts are packed: a rank has some rows of each matrix."""
    sizes: dict[str, Any] = {"hidden_size": 64}
    if kind == "experts":
        sizes["experts"] = msgspec.structs.replace(_SHARED, intermediate_size=64, shared_size=32)
    check(msgspec.structs.replace(config_of(kind), **sizes), BFLOAT16, (2, 3), form, longest=9)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["rows", "experts"])
def test_every_bit_with_an_adapter(kind: str) -> None:
    """Of attention where there are experts, and of all Q and K in each rank where they have one norm."""
    config = config_of(kind)
    expected = logits(Adapted(model(config, FLOAT32), config), 9)
    assert not torch.equal(expected, logits(OnDevice(model(config, FLOAT32)), 9))
    for found in by_ranks(2, lambda rank: logits(Adapted(model(config, FLOAT32, rank), config, rank.shard), 9)):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_drafts_of_a_head_have_the_bits_of_one_device(tmp_path: Path) -> None:
    """Each rank has the whole layer, and with the others the model's embeddings and head."""
    (tmp_path / "config.json").write_text(json.dumps({**LATENT, "num_hidden_layers": 1, "vocab_size": 101}))
    config = read_model_config(tmp_path)
    taps = torch.from_numpy(np.random.default_rng(2).standard_normal((2, 1, config.hidden_size), np.float32))
    ids, tables = np.array([100, 7]), np.array([[1], [2]], np.int32)

    def drafted(rank: Rank | None) -> Floats:
        head = load_mtp(tmp_path, config, model(config, FLOAT32, rank), is_made_up=True)
        states, cache = head.states(taps.to(DEVICE)), head.allocate_cache(3, 16)
        found = []
        for position in range(2):
            logits, states = head.forward(ids, states, np.array([position, position]), tables, cache)
            found.append(logits)
        return np.concatenate(found)

    expected = drafted(None)
    assert len(np.unique(expected)) > len(expected)
    for found in by_ranks(2, drafted):
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
