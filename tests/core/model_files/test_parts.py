"""Models that several workers cannot compute together are refused by what they have."""

from pathlib import Path

import pytest

from core.model_files.parts import check_parts
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from tests.core.runner.invariance_kinds import KINDS


@pytest.mark.parametrize(
    ("kind", "reason", "ranks", "stages"),
    [
        ("state space", "a table of positions", 2, 1),
        ("recurrent layers with norms before", "the activation xIELU", 2, 1),
        ("shared keys and values", "layers that share K and V", 1, 2),
        ("gated delta", "=5 is more than the 4 heads of the recurrent layers", 5, 1),
        ("gated delta", "more than the model's 1 layers with attention: use at most 1", 1, 2),
    ],
)
def test_what_cannot_be_split_is_named(kind: str, reason: str, ranks: int, stages: int) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_parts(Path("model"), EngineConfig(), KINDS[kind], ranks, stages)
