"""Groups of workers that compute a model together: answers with every bit of one process, whatever dies."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.executors.by_name import load_executor
from core.workers import step_clock
from core.workers.__main__ import cpus_of, parse_cpus
from core.workers.part_executor import PartExecutor
from core.workers.wires import Place, Wires
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig
from kernels.cpu.group import make_shared_file
from tests.core.workers.part_answers import (
    BESIDE,
    CONVOLUTIONS,
    HYBRID,
    LATENT,
    ROUTED,
    STATE_SPACE,
    STREAMS,
    answers,
    config_of,
    kill,
)
from tests.placed import PREFIX


def test_every_bit_is_that_of_one_process(folder: str, alone: list[Any]) -> None:
    assert len(alone[1]) == 7
    assert answers(config_of(folder, 2), {9: kill(1)}) == alone


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_bit_at_any_size_and_whichever_rank_dies(folder: str, size: int, dtype: str) -> None:
    alone = answers(config_of(folder, 1, dtype=dtype))
    assert answers(config_of(folder, size, dtype=dtype)) == alone
    assert answers(config_of(folder, size, dtype=dtype), {5: kill(0), 40: kill(size - 1)}) == alone


def test_stages_give_the_bits_of_one_process_and_their_death_is_a_pause(folder: str, alone: list[Any]) -> None:
    assert answers(config_of(folder, 1, pipeline_parallel_size=2), {9: kill(0)}) == alone


#: A step costs so much that each draft pays.
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "step_ns": (10**9,) * 8}


@pytest.fixture(scope="module")
def hybrid_alone(hybrid: str) -> list[Any]:
    return answers(drafting(config_of(hybrid, 1)), least_accepted=9)


@pytest.mark.parametrize(("ranks", "stages", "threads"), [(1, 2, 1), (2, 1, 2)])
def test_workers_keep_the_states_of_recurrent_layers(
    hybrid: str, hybrid_alone: list[Any], ranks: int, stages: int, threads: int
) -> None:
    config = drafting(config_of(hybrid, ranks, pipeline_parallel_size=stages, threads=threads))
    assert answers(config, {9: kill(0)}, least_accepted=9) == hybrid_alone


@pytest.mark.parametrize(
    "own",
    [ROUTED, LATENT, STREAMS, pytest.param(BESIDE, marks=pytest.mark.soak)],
    ids=["routed", "latent", "streams", "beside"],
)
def test_ranks_divide_layers_of_other_kinds(tmp_path: Path, own: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(own))
    options = {"num_gpu_blocks_override": 16} if own is BESIDE else {}  # its blocks are pages
    alone = answers(config_of(str(tmp_path), 1, **options))
    assert answers(config_of(str(tmp_path), 2, threads=1 + (own is ROUTED), **options), {9: kill(1)}) == alone


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "own",
    [HYBRID, CONVOLUTIONS, STATE_SPACE, ROUTED, LATENT],
    ids=["delta", "convolutions", "state space", "routed", "latent"],
)
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_states_at_any_shape_and_whichever_worker_dies(
    tmp_path: Path, ranks: int, stages: int, own: dict[str, Any], dtype: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(own))
    alone = answers(drafting(config_of(str(tmp_path), 1, dtype=dtype)))
    config = drafting(config_of(str(tmp_path), ranks, pipeline_parallel_size=stages, dtype=dtype))
    assert answers(config) == alone
    assert answers(config, {5: kill(0), 40: kill(ranks * stages - 1)}) == alone


def drafting(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, speculative_config=SpeculativeConfig(**DRAFTS))


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ranks", "stages", "options"), [(1, 3, {}), (2, 2, {}), (1, 2, {"async_scheduling": True})])
def test_every_bit_at_any_shape_and_whichever_stage_dies(
    deep: str, ranks: int, stages: int, options: dict[str, Any], dtype: str
) -> None:
    alone = answers(config_of(deep, 1, dtype=dtype))
    config = config_of(deep, ranks, dtype=dtype, pipeline_parallel_size=stages, **options)
    assert answers(config) == alone
    assert answers(config, {5: kill(0), 40: kill(ranks * stages - 1)}) == alone


@pytest.mark.soak
def test_a_stage_that_hangs_is_found(folder: str, alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "LEAST_S", 0.4)
    stop = {9: kill(0, signal.SIGSTOP), 40: kill(1, signal.SIGSTOP)}
    assert answers(config_of(folder, 1, pipeline_parallel_size=2), stop) == alone


@pytest.mark.soak
def test_drafts_are_verified_by_stages(folder: str) -> None:
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    alone, staged = (answers(config_of(folder, 1, **drafts, pipeline_parallel_size=size)) for size in (1, 2))
    assert alone[:2] == staged[:2]


@pytest.mark.soak
def test_drafts_are_verified_by_all_ranks(folder: str) -> None:
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    alone, together = (answers(config_of(folder, size, **drafts)) for size in (1, 3))
    assert alone[:2] == together[:2]


def test_bad_sizes_are_refused_by_name(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_shared_file()
    try:
        with pytest.raises(ConfigError, match="tensor_parallel_size=5 is more than the 4 query heads"):
            PartExecutor(config_of(folder, 1), Place(0, 5), Wires(memory))
        with pytest.raises(ConfigError, match="at numerics level L2: leave out numerics and cpu_kernels"):
            PartExecutor(config_of(folder, 1, numerics="L0"), Place(0, 2), Wires(memory))
    finally:
        os.close(memory)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 needs worker processes"):
        config_of(folder, 2, distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 is for executor='local'; got executor='npu'"):
        config_of(folder, 2, executor="npu")
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 needs worker processes"):
        config_of(folder, 1, pipeline_parallel_size=2, distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match="pipeline_parallel_size=3 is more than the model's 2 layers"):
        load_executor(config_of(folder, 1, pipeline_parallel_size=3))
    with monkeypatch.context() as patch:  # no worker is started for a number that cannot be
        patch.setattr(f"{PREFIX}core.workers.executor.WorkersExecutor", None)
        with pytest.raises(ConfigError, match="tensor_parallel_size=99 is more than the 4 query heads"):
            load_executor(config_of(folder, 99))


def test_ranks_are_placed_on_nodes() -> None:
    nodes = [{0, 1, 2, 3}, {4, 5, 6, 7}]
    every = set(range(8))
    assert [cpus_of(rank, 2, nodes, every) for rank in range(2)] == nodes
    assert [cpus_of(rank, 4, nodes, every) for rank in range(4)] == [nodes[0], nodes[0], nodes[1], nodes[1]]
    assert cpus_of(0, 1, nodes, every) == every
    assert cpus_of(1, 2, nodes, {0, 1, 2}) == {0, 1, 2}  # the other node is not ours
    assert [cpus_of(rank, 2, [], {0, 1}) for rank in range(2)] == [{0, 1}, {0, 1}]
    assert parse_cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpus("\n") == set()
