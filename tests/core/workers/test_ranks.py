"""Groups of workers that compute a model together: answers with every bit of one process, whatever dies."""

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.executors.by_name import load_executor
from core.inputs import EngineInput
from core.process.resolve import resolve, resolve_costs
from core.workers import step_clock
from core.workers.executor import WorkersExecutor
from core.workers.part_executor import PartExecutor
from core.workers.placement import cpus_of, parse_cpus
from core.workers.wires import Place, Wires
from ipc.config import EngineConfig
from ipc.errors import ConfigError
from ipc.given_options import config_from_options
from ipc.messages import AddRequest, Outputs
from ipc.sampling_params import SamplingParams
from kernels.cpu.group import make_shared_file

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "vocab_size": 500,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "threads": 1,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 11,  # too few for all: some are preempted, and copied to the host
    "max_num_batched_tokens": 48,
    "max_model_len": 128,
    "preemption_mode": "swap",
    "num_swap_blocks": 40,
    "generation_config": "vllm",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("deep")
    (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 4}))
    return str(folder)


def requests() -> list[AddRequest]:
    rng, found = np.random.default_rng(5), []
    for number in range(6):
        options: dict[str, Any] = {"temperature": 0.9, "top_k": 50} if number % 2 else {"temperature": 0.0}
        if number == 2:
            options |= {"logprobs": 3, "prompt_logprobs": 2}
        if number == 3:
            options |= {"n": 2, "logprobs": 1, "repetition_penalty": 1.3}
        if number == 4:
            options |= {"logit_bias": {7: 3.0}}
        prompt = np.tile(rng.integers(3, 400, 11), 5)[: 20 + 6 * number]  # with repetitions, for drafts
        params = SamplingParams(max_tokens=30, ignore_eos=True, **options)
        found.append(AddRequest(number, prompt.astype("<i4").tobytes(), params, seed=number))
    return found


def answers(config: EngineConfig, disturb: dict[int, Callable[[WorkersExecutor], None]] | None = None) -> list[Any]:
    """Return all that comes for the requests, by request: tokens, log probabilities, ends."""
    executor = load_executor(config)
    news: list[tuple[int, EngineInput]] = []
    if isinstance(executor, WorkersExecutor):
        executor.follow(lambda one: news.append((0, one)))
    try:
        sizes = {"total_memory_bytes": 1 << 30, "num_cpus": 1}
        resolved = resolve(config, executor.info, executor.determine_num_available_blocks, **sizes)
        executor.initialize_cache(resolved)
        resolved = resolve_costs(resolved, executor.measure_costs, executor.measure_steps)
        executor.warm_up()
        engine = EngineCore(resolved, executor)
        inbox: list[tuple[int, EngineInput]] = [(0, message) for message in requests()]
        tokens: dict[tuple[int, int], list[int]] = {}
        values: dict[tuple[int, int], bytes] = {}
        num_steps, end = 0, time.monotonic() + 60
        while inbox or engine.has_unfinished:
            assert time.monotonic() < end, "the requests do not end"
            inbox, taken = [*inbox, *news], len(news)
            del news[:taken]
            if engine.has_work:
                num_steps += 1
                if disturb and num_steps in disturb:
                    disturb[num_steps](executor)  # type: ignore[arg-type]
            for _, reply in engine.step(inbox, time.monotonic_ns()):
                assert isinstance(reply, Outputs), reply
                _take(reply, tokens, values)
            inbox = []
            if not engine.has_work:
                time.sleep(0.002)
        assert engine.scheduler.stats.num_swapped_out_blocks > 0
        return [executor.info.fingerprint, sorted(tokens.items()), sorted(values.items())]
    finally:
        executor.close()


def _take(reply: Outputs, tokens: dict[tuple[int, int], list[int]], values: dict[tuple[int, int], bytes]) -> None:
    numbers = np.frombuffer(reply.numbers, "<u4").tolist()
    choices = np.frombuffer(reply.choices, "<u2").tolist() if reply.choices else [0] * len(numbers)
    ids, first = np.frombuffer(reply.tokens, "<i4").tolist(), 0
    for number, choice, count in zip(numbers, choices, np.frombuffer(reply.counts, "<u2").tolist(), strict=True):
        tokens.setdefault((number, choice), []).extend(ids[first : first + count])
        first += count
    if (columns := reply.logprobs) is not None:
        first = 0
        packed = (np.frombuffer(each, "<u4").tolist() for each in (columns.numbers, columns.positions, columns.counts))
        for number, position, count in zip(*packed, strict=True):
            values[number, position] = columns.values[4 * first : 4 * (first + count)]
            first += count


def config_of(folder: str, size: int, **options: Any) -> EngineConfig:
    return config_from_options(model=folder, **{**OPTIONS, "tensor_parallel_size": size, **options})


@pytest.fixture(scope="module")
def alone(folder: str) -> list[Any]:
    return answers(config_of(folder, 1))


def test_every_bit_is_that_of_one_process(folder: str, alone: list[Any]) -> None:
    assert len(alone[1]) == 7
    assert answers(config_of(folder, 2), {9: kill(1)}) == alone


def kill(worker: int, number: int = signal.SIGKILL) -> Callable[[WorkersExecutor], None]:
    return lambda executor: os.kill(executor.pids[worker], number)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_bit_at_any_size_and_whichever_rank_dies(folder: str, size: int, dtype: str) -> None:
    alone = answers(config_of(folder, 1, dtype=dtype))
    assert answers(config_of(folder, size, dtype=dtype)) == alone
    assert answers(config_of(folder, size, dtype=dtype), {5: kill(0), 40: kill(size - 1)}) == alone


def test_stages_give_the_bits_of_one_process_and_their_death_is_a_pause(folder: str, alone: list[Any]) -> None:
    assert answers(config_of(folder, 1, pipeline_parallel_size=2), {9: kill(0)}) == alone


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


def test_bad_sizes_are_refused_by_name(folder: str) -> None:
    memory = make_shared_file()
    try:
        with pytest.raises(ConfigError, match="tensor_parallel_size=5 is more than the 4 query heads"):
            PartExecutor(config_of(folder, 1), Place(0, 5), Wires(memory))
        with pytest.raises(ConfigError, match="at numerics level L2: leave out device, numerics and cpu_kernels"):
            PartExecutor(config_of(folder, 1, numerics="L0"), Place(0, 2), Wires(memory))
    finally:
        os.close(memory)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 takes worker processes"):
        config_of(folder, 2, distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 is for executor='local'; got executor='npu'"):
        config_of(folder, 2, executor="npu")
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 takes worker processes"):
        config_of(folder, 1, pipeline_parallel_size=2, distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match="pipeline_parallel_size=3 is more than the 2 layers of the model"):
        load_executor(config_of(folder, 1, pipeline_parallel_size=3))
    with pytest.raises(ConfigError, match="leave pipeline_parallel_size out"):
        config_of(folder, 1, pipeline_parallel_size=2, speculative_config={"method": "eagle3", "model": "m"})


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
