"""Adapters of engines with workers: each worker has its part of them, and every bit is that of one process."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.adapters.adapter import AdapterWeights, digest_of
from core.model_files.model_config import read_model_config
from core.models.layers.adapted import AdaptedMatrices
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import AddRequest
from kernels.low_rank import LowRank
from tests.core.adapters.peft_files import random_matrices
from tests.core.workers.part_answers import CONVOLUTIONS, STATE_SPACE, answers, config_of, kill, requests
from tests.core.workers.test_nodes import free_port, machines, over

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
#: OLMo 3: all heads of Q have one norm, and so have those of K.
OLMO = {**CONVOLUTIONS, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
OLMO |= {"layer_types": ["full_attention"] * 4, "sliding_window": 64}


def adapters_of(folder: str) -> list[AdapterWeights]:
    """Two adapters: of all matrices, and of some with another rank."""
    shapes, made = AdaptedMatrices(read_model_config(Path(folder), None), None).shapes, []
    for seed, rank in ((1, 4), (2, 7)):
        names = {name.rsplit(".", 1)[-1] for name in shapes} - ({"down_proj", "in_proj"} if seed == 2 else set())
        pairs = random_matrices(shapes, rank, seed, targets=names)
        matrices = {name: LowRank(a, b, 0.75) for name, (a, b) in pairs.items()}
        made.append(AdapterWeights(matrices, digest_of(matrices)))
    return made


def adapted(weights: list[AdapterWeights], sent: list[AddRequest] | None = None) -> list[AddRequest]:
    """These requests, or the usual ones, with each adapter in turn, and none."""
    digests = ["", *(one.digest for one in weights)]
    named = [AdapterId(digest) if digest else None for digest in digests]
    return [msgspec.structs.replace(one, adapter=named[number % 3]) for number, one in enumerate(sent or requests())]


def run(folder: str, size: int, disturb: Any = None, **options: Any) -> list[Any]:
    weights = adapters_of(folder)
    return answers(config_of(folder, size, **LORA, **options), disturb, sent=adapted(weights), adapters=weights)


@pytest.fixture(scope="module")
def hybrid_alone(hybrid: str) -> list[Any]:
    return run(hybrid, 1)


@pytest.mark.parametrize(
    ("size", "options", "disturb"),
    [
        (2, {}, {9: kill(1)}),
        (1, {"pipeline_parallel_size": 2}, {9: kill(0)}),
        pytest.param(1, {"distributed_executor_backend": "mp"}, None, marks=pytest.mark.soak),
        pytest.param(2, {"pipeline_parallel_size": 2}, {30: kill(3)}, marks=pytest.mark.soak),
    ],
    ids=["ranks", "stages", "one worker", "both"],
)
def test_every_bit_is_that_of_one_process(
    hybrid: str, hybrid_alone: list[Any], size: int, options: dict[str, Any], disturb: Any
) -> None:
    assert run(hybrid, size, disturb, **options) == hybrid_alone


def test_adapters_change_answers(hybrid: str, hybrid_alone: list[Any]) -> None:
    assert answers(config_of(hybrid, 1))[1] != hybrid_alone[1]


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("own", [CONVOLUTIONS, STATE_SPACE, OLMO], ids=["convolutions", "state space", "olmo"])
def test_every_bit_of_other_layers(tmp_path: Path, own: dict[str, Any], dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert run(str(tmp_path), 3, {5: kill(2)}, dtype=dtype) == run(str(tmp_path), 1, dtype=dtype)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        pytest.param(1, {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}, marks=pytest.mark.soak),
    ],
    ids=["ranks", "stages placed by Ray"],
)
def test_other_machines_get_them_from_the_engine(
    tmp_path: Path, hybrid: str, hybrid_alone: list[Any], size: int, options: dict[str, Any]
) -> None:
    """A machine that has joined again gets them again."""
    port, count = free_port(), 2 if options else 1
    with machines(tmp_path, port, count) as others:
        assert run(hybrid, size, {9: lambda _: others[-1].fail()}, **options, **over(port, 2)) == hybrid_alone
