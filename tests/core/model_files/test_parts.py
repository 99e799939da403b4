"""Models that several workers cannot compute together are refused by what they have."""

from pathlib import Path

import msgspec
import pytest

from core.model_files.parts import check_parts
from core.models.config import HeadSizes
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from tests.core.runner.invariance_kinds import KINDS


@pytest.mark.parametrize(
    ("kind", "reason", "ranks", "stages"),
    [
        ("streams and sparse gates", "cannot be cut into stages, as layers from 0 on share K and V", 1, 2),
        ("shared keys and values", "before layers 1 to 1 only, as layers from 1 on share K and V: use at most 2", 1, 3),
        ("gated delta", "=5 is more than the 4 heads of the recurrent layers", 5, 1),
        ("gated delta", "more than the model's 1 layers with attention: use at most 1", 1, 2),
    ],
)
def test_what_cannot_be_split_is_named(kind: str, reason: str, ranks: int, stages: int) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_parts(Path("model"), EngineConfig(), KINDS[kind], ranks, stages)


def test_ranks_are_no_more_than_the_columns_of_an_expert() -> None:
    model = KINDS["shared experts"]
    assert model.experts is not None
    narrow = msgspec.structs.replace(model, experts=msgspec.structs.replace(model.experts, shared_size=3))
    check_parts(Path("model"), EngineConfig(), narrow, 3, 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 is more than the 3 columns of an MLP of model"):
        check_parts(Path("model"), EngineConfig(), narrow, 4, 1)


@pytest.mark.parametrize("kind", ["experts", "latent attention", "norms after", "streams and sparse gates"])
def test_ranks_on_gpus_divide_what_ranks_on_cpus_do(kind: str) -> None:
    for device in ("cpu", "cuda"):
        check_parts(Path("model"), EngineConfig(device=device), KINDS[kind], 2, 1)
        with pytest.raises(ConfigError, match="tensor_parallel_size=99 is more than the"):
            check_parts(Path("model"), EngineConfig(device=device), KINDS[kind], 99, 1)


def test_heads_of_two_kinds_of_layers_have_whole_groups_in_common() -> None:
    two = msgspec.structs.replace(KINDS["norms after"], num_key_value_heads=2, full_heads=HeadSizes(3, 16))
    check_parts(Path("model"), EngineConfig(), msgspec.structs.replace(two, full_heads=HeadSizes(1, 16)), 2, 1)
    with pytest.raises(ConfigError, match="model has layers with other heads, which cannot be split among ranks"):
        check_parts(Path("model"), EngineConfig(), two, 2, 1)
