"""The whole engine with --device cuda: the tokens of the CPU path, at depth 1 and 2, with options and preemption. In CI
its kernels run under Triton's interpreter."""

from typing import Any

import numpy as np
import pytest
import torch

from core.engine import EngineCore
from core.execution.executor import ModelInfo, StepHandle
from core.execution.plan import SchedulerOutput
from core.models.config import ExpertParts, HeadSizes, PerLayerParts
from core.models.layers.rope_scaling import LongropeScaling, YarnScaling
from core.models.llama import Llama
from core.models.operations.triton_operations import TritonOperations
from core.runner.cuda_model_runner import CudaModelRunner
from core.runner.model_runner import ModelRunner
from ipc.options.config import LogprobsMode, PreemptionMode
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Logprobs, Outputs
from kernels.elements import FLOAT32
from kernels.triton.kv_cache import Int8KVCache, TritonKVCache
from tests.core.models.test_llama import random_weights, tiny_config
from tests.resolved import resolved_config
from tests.triton_device import ANYWHERE, DEVICE, GPU_ONLY, ON_GPU

pytestmark = ANYWHERE

VOCAB = 64
BLOCK_SIZE = 16
MAX_MODEL_LEN = 96


def both(cache_type: type[TritonKVCache] = TritonKVCache, **changes: Any) -> tuple[Llama, Llama]:
    """One tiny model by torch's kernels and by Triton's. cache_type: of these."""
    config = tiny_config(**{"vocab_size": VOCAB, "num_hidden_layers": 2, **changes})
    operations = TritonOperations(config, FLOAT32, DEVICE, cache_type=cache_type)
    weights = list(random_weights(config, FLOAT32))
    return Llama(config, weights, FLOAT32), Llama(config, weights, FLOAT32, operations=operations)


class RunnerExecutor:
    """A runner as an executor."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.info = ModelInfo("tiny", "00", "float32", VOCAB, MAX_MODEL_LEN, (2,), "L0")

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        if isinstance(self.runner, CudaModelRunner):
            return self.runner.begin(plan)
        output = self.runner.execute(plan)
        return type("Done", (), {"result": lambda _: output})()

    def close(self) -> None: ...


#: The fields of models with parts that a Llama has not, as many as go together.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "parallel": {
        "scores_cap": 2.0,
        "attention_sinks": True,
        "qk_norm": True,
        "qk_norm_by_head": True,
        "qk_norm_after": True,
        "centred_norms": True,
        "norm_bias": True,
        "residual": "parallel",
        "is_gated": False,
        "hidden_act": "relu2",
        "output_gate": True,
        "sliding_window": 20,
        "sliding_layers": (0,),
        "query_growth": 0.5,
        "rope_scaling": YarnScaling(4.0, 9, 1.2),
    },
    "post norms": {
        "num_hidden_layers": 1,
        "qk_norm": True,
        "qk_norm_of_rows": True,
        "pre_norms": False,
        "post_norms": True,
        "residual_multiplier": 0.4,
        "rope_scaling": LongropeScaling((1.0,) * 6, (1.5,) * 6, 64, 1.1),
    },
    "layers that differ": {
        "num_hidden_layers": 3,
        "sliding_window": 20,
        "sliding_layers": (0, 2),
        "num_shared_layers": 1,
        "full_heads": HeadSizes(1, 20),
        "value_norm": True,
        "qk_norm": True,
        "layer_scales": True,
        "hidden_act": "gelu_pytorch_tanh",
        "per_layer": PerLayerParts(width=10, vocab_size=VOCAB),
    },
    "routed MLPs": {
        "num_hidden_layers": 1,
        "experts": ExpertParts(
            num_experts=7, num_chosen=3, intermediate_size=36, normalises=False, shared_size=52, has_shared_gate=True
        ),
    },
}
#: By shape, once built.
MODELS: dict[str, tuple[Llama, Llama]] = {}
#: Shapes whose KV cache on the device is in 8 bits; torch's is not.
CACHES: dict[str, type[TritonKVCache]] = {"int8 cache": Int8KVCache}


NUM_SWAP_BLOCKS = 12


def runner(
    kind: str, num_blocks: int, logprobs_mode: LogprobsMode = "raw_logprobs", shape: str = "llama"
) -> ModelRunner:
    if shape not in MODELS:
        MODELS[shape] = both(CACHES.get(shape, TritonKVCache), **SHAPES.get(shape, SHAPES["llama"]))
    torch_model, triton_model = MODELS[shape]
    options: dict[str, Any] = {"num_rows": 4, "num_blocks": num_blocks, "block_size": BLOCK_SIZE, "eos_token_ids": (2,)}
    options |= {"num_swap_blocks": NUM_SWAP_BLOCKS, "logprobs_mode": logprobs_mode}
    if kind == "torch":
        return ModelRunner(torch_model, **options)
    operations = triton_model.operations
    assert isinstance(operations, TritonOperations)
    made = CudaModelRunner(triton_model, operations, max_model_len=MAX_MODEL_LEN, **options)
    for layer in made.cache.layers:
        layer[1:] = torch.nan if layer.is_floating_point() else 0x7F  # NaN as e4m3, and as a scale
    return made


class Answers:
    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.others: dict[tuple[int, int], list[int]] = {}  # by number and choice, from 1 on
        self.logprobs: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self.num_preemptions = self.num_swapped_in_blocks = 0

    def take(self, message: Outputs) -> None:
        numbers, counts = (np.frombuffer(message.numbers, "<u4"), np.frombuffer(message.counts, "<u2"))
        values = iter(np.frombuffer(message.tokens, "<i4").tolist())
        choices = np.frombuffer(message.choices, "<u2").tolist() if message.choices else [0] * len(numbers)
        for number, choice, count in zip(numbers.tolist(), choices, counts.tolist(), strict=True):
            tokens = self.others.setdefault((number, choice), []) if choice else self.tokens[number]
            tokens += [next(values) for _ in range(count)]
        if message.logprobs is not None:
            self._take_logprobs(message.logprobs)

    def follow(self, engine: EngineCore, inbox: list[Any]) -> None:
        """Step until nothing is left to do, with what comes in before the first step, and take all outputs."""
        while inbox or engine.has_work:
            for _, message in engine.step(inbox, 0):
                assert isinstance(message, Outputs), message
                self.take(message)
            inbox = []

    def _take_logprobs(self, reported: Logprobs) -> None:
        entries = zip(
            np.frombuffer(reported.token_ids, "<i4").tolist(),
            np.frombuffer(reported.values, "<f4").tolist(),
            strict=True,
        )
        columns = (
            np.frombuffer(reported.numbers, "<u4"),
            np.frombuffer(reported.positions, "<u4"),
            np.frombuffer(reported.counts, "<u4"),
        )
        for number, position, count in zip(*(column.tolist() for column in columns), strict=True):
            self.logprobs[number, position] = [next(entries) for _ in range(count)]


def run(
    kind: str,
    requests: list[tuple[list[int], SamplingParams]],
    depth: int = 1,
    num_blocks: int = 40,
    mode: PreemptionMode = "recompute",
    logprobs_mode: LogprobsMode = "raw_logprobs",
    shape: str = "llama",
) -> Answers:
    executor = RunnerExecutor(runner(kind, num_blocks, logprobs_mode, shape))
    config = resolved_config(
        executor="local",
        device="cuda",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=BLOCK_SIZE,
        num_blocks_override=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        async_scheduling=depth == 2,
        preemption_mode=mode,
        num_swap_blocks=NUM_SWAP_BLOCKS if mode == "swap" else 0,
    )
    engine = EngineCore(config, executor)
    inbox = [(0, AddRequest(i, np.array(ids, "<i4").tobytes(), params, i)) for i, (ids, params) in enumerate(requests)]
    answers = Answers(len(requests))
    while inbox or engine.has_work:
        for _, message in engine.step(inbox, 0):
            assert isinstance(message, Outputs), message
            answers.take(message)
        inbox = []
    answers.num_preemptions = engine.scheduler.stats.num_preemptions
    answers.num_swapped_in_blocks = engine.scheduler.stats.num_swapped_in_blocks
    return answers


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def test_greedy_tokens_are_those_of_the_cpu() -> None:
    requests = [(ids(length, length), SamplingParams(temperature=0, max_tokens=5)) for length in (1, 20, 45)]
    expected = run("torch", requests).tokens
    assert [len(tokens) for tokens in expected] == [5, 5, 5]
    assert run("triton", requests).tokens == expected
    assert run("triton", requests, depth=2).tokens == expected


@pytest.mark.parametrize("shape", ["parallel", "post norms", "routed MLPs"])
def test_tokens_of_other_architectures_are_those_of_the_cpu(shape: str) -> None:
    """A prompt is longer than a step's budget and than the window."""
    requests = [
        (ids(length, length), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)) for length in (40, 10)
    ]
    expected = run("torch", requests, shape=shape).tokens
    assert run("triton", requests, depth=2, shape=shape).tokens == expected


def test_sampled_tokens_are_those_of_the_cpu() -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 1.5},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 9, "min_p": 0.05},
    ]
    requests = [(ids(4, n), SamplingParams(max_tokens=4, ignore_eos=True, **each)) for n, each in enumerate(options)]
    expected = run("torch", requests).tokens
    assert run("triton", requests).tokens == expected
    assert run("triton", requests, depth=2).tokens == expected


@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logits"])
def test_options_that_look_back_and_log_probabilities(logprobs_mode: LogprobsMode) -> None:
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 3.0, "frequency_penalty": 1.0},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"logit_bias": {7: 5.0, 9: 5.5}, "logprobs": 0, "presence_penalty": 2.0},
    ]
    requests = [(ids(5, 0), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **each)) for each in options]
    expected = run("torch", requests, logprobs_mode=logprobs_mode)
    assert {number for number, _ in expected.logprobs} == {1, 2}
    for depth in (1, 2):
        got = run("triton", requests, depth, logprobs_mode=logprobs_mode)
        assert got.tokens == expected.tokens
        assert got.logprobs.keys() == expected.logprobs.keys()
        for key, entries in expected.logprobs.items():
            assert [token for token, _ in got.logprobs[key]] == [token for token, _ in entries]
            np.testing.assert_allclose([x for _, x in got.logprobs[key]], [x for _, x in entries], atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_and_beams_that_fork(depth: int) -> None:
    """Blocks are copied within the cache, and rows of a search become copies of others."""
    options: list[dict[str, Any]] = [
        {"n": 3, "temperature": 1.5},
        {"use_beam_search": True, "n": 2, "best_of": 3, "temperature": 0, "repetition_penalty": 1.4},
    ]
    requests = [(ids(6, n), SamplingParams(max_tokens=6, ignore_eos=True, **each)) for n, each in enumerate(options)]
    expected = run("torch", requests)
    got = run("triton", requests, depth)
    assert (got.tokens, got.others) == (expected.tokens, expected.others)
    assert set(got.others) == {(0, 1), (0, 2), (1, 1)}
    assert len({tuple(tokens) for tokens in (*got.tokens, *got.others.values())}) == 5


@pytest.mark.parametrize(
    ("depth", "mode"),
    [(1, "recompute"), (2, "swap"), *(pytest.param(*each, marks=GPU_ONLY) for each in ((2, "recompute"), (1, "swap")))],
)
def test_preempted_requests_give_the_same_tokens(depth: int, mode: PreemptionMode) -> None:
    requests = [(ids(14, seed), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for seed in range(3)]
    expected = run("torch", requests)
    got = run("triton", requests, depth, num_blocks=7, mode=mode)
    assert got.num_preemptions > 0
    assert (got.num_swapped_in_blocks > 0) == (mode == "swap")
    assert got.tokens == expected.tokens


def test_blocks_in_8_bits_come_back_from_the_hosts_memory() -> None:
    requests = [(ids(30, seed), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)) for seed in range(3)]
    expected = run("triton", requests, shape="int8 cache")
    got = run("triton", requests, 2, num_blocks=8, mode="swap", shape="int8 cache")
    assert (got.num_swapped_in_blocks > 0, expected.num_preemptions) == (True, 0)
    assert got.tokens == expected.tokens


def test_blocks_of_heads_of_two_sizes_come_back_from_the_hosts_memory() -> None:
    requests = [(ids(30, seed), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)) for seed in range(3)]
    expected = run("torch", requests, shape="layers that differ")
    got = run("triton", requests, 2, num_blocks=8, mode="swap", shape="layers that differ")
    assert got.num_swapped_in_blocks > 0
    assert got.tokens == expected.tokens


def test_costs_of_preemption_are_measured() -> None:
    costs = runner("triton", 40).measure_costs()
    assert min(costs) > 0
    assert costs.swap_ns_per_block < 10**9, "the host has room for blocks"


def test_blocks_go_to_the_hosts_memory_and_back() -> None:
    made = runner("triton", 6)
    operations = MODELS["llama"][1].operations
    assert isinstance(operations, TritonOperations)
    pool = operations.allocate_swap_cache(3, BLOCK_SIZE)
    assert [(layer.device.type, layer.is_pinned()) for layer in pool.layers] == [("cpu", ON_GPU)]
    made.cache.layers[0][[2, 5]] = torch.arange(2.0, device=DEVICE).view(2, 1, 1, 1, 1) + 1
    made.cache.copy_blocks(np.array([2, 5], np.int32), pool, np.array([2, 1], np.int32))
    pool.copy_blocks(np.array([1, 2], np.int32), made.cache, np.array([3, 4], np.int32))
    assert made.cache.layers[0][3:5, 0, 0, 0, 0].tolist() == [2, 1]


def test_a_row_whose_logits_are_no_numbers_fails_alone() -> None:
    made = runner("triton", 40)
    logits = torch.zeros((2, VOCAB), device=DEVICE)
    logits[0, 0] = torch.nan
    made.table.num_tokens[:2] = 1
    drawn = made._draw(logits, made.sampling.inputs(np.arange(2), made.table), np.arange(2), np.ones(2, np.int64))
    assert drawn.tolist() == [-1, 0]
    assert made._tables.tokens[:2, 1].tolist() == [0, 0]
