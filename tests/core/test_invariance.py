"""Numerics level L2 through engine, scheduler and runner: a request's logits and tokens are its own, bit for bit.

The same run under --numerics L0 (torch's attention) must fail: otherwise this suite could not see a difference.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from core.engine import EngineCore
from core.executor.interface import FinishedStep, ModelInfo
from core.executor.local import LocalExecutor
from core.model_config import ModelConfig, read_model_config
from core.model_runner import ModelRunner
from core.models.llama import Llama
from core.plan import SchedulerOutput
from core.rope_scaling import LinearScaling
from core.weights import expected_shapes, load_weights
from ipc.config import EngineConfig, Numerics
from ipc.messages import AddRequest, Outputs, RequestFailed
from ipc.model_files import resolve_model
from ipc.paged_rows import Int32s, Ints
from ipc.sampling_params import SamplingParams
from kernels.cpu_library import CpuLibrary, load_cpu_library

TARGET = 1000  # number of the request that is watched

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=500,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(0,),
    dtype="float32",
)

#: What changes attention, by name. The windows end within KV tiles of 128 tokens and within blocks of 16.
KINDS: dict[str, ModelConfig] = {
    "plain": TINY,
    "sliding window": msgspec.structs.replace(TINY, sliding_window=90, sliding_layers=(0, 1, 2), qkv_bias=True),
    "head norms": msgspec.structs.replace(TINY, qk_norm=True, head_dim=24, output_bias=True),
    "local and global": msgspec.structs.replace(
        TINY,
        sliding_window=139,
        sliding_layers=(0, 2),
        sliding_rope_theta=1000.0,
        rope_scaling=LinearScaling(8.0),
        query_pre_attn_scalar=40.0,
        hidden_act="gelu_pytorch_tanh",
        head_dim=32,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        scale_embeddings=True,
    ),
}


class Recorder(ModelRunner):
    """Keeps every row of logits by (seed, output position): each request of these tests has a seed of its own."""

    def __init__(self, model: Llama, config: EngineConfig) -> None:
        assert config.num_blocks_override is not None
        super().__init__(
            model,
            num_rows=config.max_num_seqs,
            num_blocks=config.num_blocks_override,
            block_size=config.block_size,
            eos_token_ids=(0,),
        )
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        for layer in self.cache.layers:
            layer[1:] = torch.nan  # what nobody stored must not be read

    def sample(self, rows: Ints, logits: torch.Tensor) -> Int32s:
        positions = self.table.num_tokens[rows] - self.table.num_prompt_tokens[rows]
        for row, position, values in zip(rows.tolist(), positions.tolist(), logits, strict=True):
            self.logits[int(self.sampling.seed[row]), position] = values.clone()
        return super().sample(rows, logits)


class RecordingExecutor:
    def __init__(self, runner: Recorder) -> None:
        self.info = ModelInfo("recorded", "", "float32", 500, 2048, (0,), "L2")
        self.runner = runner

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        return memory_bytes // block_size

    def initialize_cache(self, config: EngineConfig) -> None: ...

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        return FinishedStep(self.runner.execute(plan))

    def close(self) -> None: ...


class Run(NamedTuple):
    """What one engine made of the target request."""

    tokens: list[int]
    logits: torch.Tensor  # [tokens, vocab]
    num_preemptions: int
    num_cached_tokens: int


def request(
    number: int, prompt: Sequence[int], max_tokens: int, temperature: float, **options: Any
) -> tuple[int, AddRequest]:
    params = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens, ignore_eos=True, **options)
    return 0, AddRequest(number, np.array(prompt, "<i4").tobytes(), params, seed=number)


def run(
    model: Llama,
    prompt: Sequence[int],
    *,
    neighbours: Sequence[tuple[int, AddRequest]] = (),
    first: Sequence[tuple[int, AddRequest]] = (),
    budget: int = 512,
    num_blocks: int = 400,
    max_tokens: int = 24,
    temperature: float = 0.8,
    params: Mapping[str, Any] | None = None,
) -> Run:
    """Run `first` to its end, then the target among its neighbours, which were submitted before it."""
    config = EngineConfig(
        max_num_seqs=33,
        max_num_batched_tokens=budget,
        num_blocks_override=num_blocks,
        max_model_len=min(2048, (num_blocks - 1) * 16),
    )
    recorder = Recorder(model, config)
    engine = EngineCore(config, RecordingExecutor(recorder))
    drain(engine, list(first))
    cached = engine.scheduler.stats.prefix_cache_hits
    tokens = drain(engine, [*neighbours, request(TARGET, prompt, max_tokens, temperature, **(params or {}))])[TARGET]
    logits = torch.stack([recorder.logits[TARGET, position] for position in range(len(tokens))])
    stats = engine.scheduler.stats
    return Run(tokens, logits, stats.num_preemptions, stats.prefix_cache_hits - cached)


def drain(engine: EngineCore, inbox: list[tuple[int, AddRequest]]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while inbox or engine.has_work:
        for _, message in engine.step(inbox, 0):
            assert isinstance(message, Outputs), message
            numbers, values = np.frombuffer(message.numbers, "<u4"), np.frombuffer(message.tokens, "<i4")
            for number, token in zip(numbers.tolist(), values.tolist(), strict=True):
                tokens.setdefault(number, []).append(token)
        engine.scheduler.check_integrity()
        inbox = []
    return tokens


def neighbours(count: int, seed: int, longest: int, max_tokens: int) -> list[tuple[int, AddRequest]]:
    rng = np.random.default_rng(seed)
    return [
        request(n, rng.integers(1, 500, rng.integers(1, longest)).tolist(), int(rng.integers(1, max_tokens)), n % 3 / 2)
        for n in range(1, count + 1)
    ]


def tiny_model(
    dtype: torch.dtype, numerics: Numerics = "L2", config: ModelConfig = TINY, library: CpuLibrary | None = None
) -> Llama:
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: (torch.randn(shape, generator=generator) * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0)).to(dtype)
        for name, shape in expected_shapes(config).items()
    }
    return Llama(config, weights.items(), dtype, numerics, library)


PROMPT = np.random.default_rng(7).integers(1, 500, 300).tolist()

#: Name -> how the target is run; each must give what it gives alone.
SCENARIOS: dict[str, Callable[[Llama], Run]] = {
    "among 32": lambda model: run(model, PROMPT, neighbours=neighbours(32, 1, 200, 40)),
    "among 32 others": lambda model: run(model, PROMPT, neighbours=neighbours(32, 2, 60, 30), budget=300),
    "chunks of 128": lambda model: run(model, PROMPT, budget=128),
    "chunks of 37": lambda model: run(model, PROMPT, budget=37),
    "chunks of 3": lambda model: run(model, PROMPT, budget=3),
    "preempted": lambda model: run(model, PROMPT, neighbours=neighbours(9, 3, 30, 90), num_blocks=36, budget=60),
    "from the prefix cache": lambda model: run(model, PROMPT, first=[request(1, PROMPT[:290], 3, 0.0)]),
    "prefix cache, other chunks": lambda model: run(model, PROMPT, first=[request(1, PROMPT, 9, 0.0)], budget=5),
}


def scenario(name: str, model: Llama) -> Run:
    got = SCENARIOS[name](model)
    if name == "preempted":
        assert got.num_preemptions > 0, "the pool is too large: nothing was preempted"
    if "prefix cache" in name:
        assert got.num_cached_tokens > 200, f"only {got.num_cached_tokens} tokens came from the prefix cache"
    return got


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("kind", "kernels"), [*((kind, "torch") for kind in KINDS), ("plain", "c")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_request_alone_and_in_any_company_has_the_same_logits(dtype: torch.dtype, kind: str, kernels: str) -> None:
    model = tiny_model(dtype, config=KINDS[kind], library=load_cpu_library() if kernels == "c" else None)
    assert model.numerics == "L2"
    alone = run(model, PROMPT)
    assert len(alone.tokens) == 24
    for name in SCENARIOS:
        got = scenario(name, model)
        assert torch.equal(got.logits, alone.logits), (
            f"{name}: logits differ by {(got.logits - alone.logits).abs().max()}"
        )
        assert got.tokens == alone.tokens, name


@pytest.mark.parametrize("kernels", ["torch", "c"])
def test_two_threads_give_the_bits_of_one(kernels: str) -> None:
    library = load_cpu_library() if kernels == "c" else None
    alone = run(tiny_model(torch.bfloat16, library=library), PROMPT)
    torch.set_num_threads(2)
    if library is not None:
        library.start_threads(2)
    try:
        two = run(tiny_model(torch.bfloat16, library=library), PROMPT, neighbours=neighbours(8, 4, 80, 20))
    finally:
        torch.set_num_threads(1)
        if library is not None:
            library.stop_threads()
    assert torch.equal(two.logits, alone.logits)


@pytest.mark.parametrize("kind", ["plain", "sliding window"])
def test_torch_attention_fails_the_same_comparison(kind: str) -> None:
    model = tiny_model(torch.float32, "L0", KINDS[kind])
    assert model.numerics == "L0"
    alone = run(model, PROMPT)
    assert not all(torch.equal(scenario(name, model).logits, alone.logits) for name in SCENARIOS)


def test_the_demo_model_in_bfloat16() -> None:
    path = resolve_model(None)
    config = read_model_config(path)
    model = Llama(config, load_weights(path, config, torch.bfloat16), torch.bfloat16, library=load_cpu_library())
    prompt = PROMPT[:150]
    alone = run(model, prompt, max_tokens=6)
    others = neighbours(16, 1, 60, 12)
    assert torch.equal(run(model, prompt, max_tokens=6, neighbours=others, budget=100).logits, alone.logits)
    assert torch.equal(run(model, prompt, max_tokens=6, budget=19).logits, alone.logits)
    squeezed = run(model, prompt, max_tokens=6, neighbours=neighbours(4, 3, 30, 40), num_blocks=16)
    assert torch.equal(squeezed.logits, alone.logits)
    again = run(model, prompt, max_tokens=6, first=[request(1, prompt, 2, 0.0)])
    assert again.num_cached_tokens == 144
    assert torch.equal(again.logits, alone.logits)


def test_tokens_with_a_pool_too_small_equal_those_of_an_unhurried_run() -> None:
    """All requests, not one: the pool holds a fifth of what runs."""
    requests = neighbours(16, 9, 20, 100)  # short prompts, long outputs: all start, few can stay
    model = tiny_model(torch.float32)

    def tokens(num_blocks: int) -> tuple[dict[int, list[int]], int]:
        config = EngineConfig(
            max_num_seqs=16, max_num_batched_tokens=128, num_blocks_override=num_blocks, max_model_len=190
        )
        engine = EngineCore(config, RecordingExecutor(Recorder(model, config)))
        return drain(engine, requests), engine.scheduler.stats.num_preemptions

    unhurried, none = tokens(400)
    squeezed, some = tokens(20)
    assert none == 0
    assert some > 10, f"{some} preemptions"
    assert squeezed == unhurried


def test_nan_logits_fail_one_request_alone() -> None:
    model = tiny_model(torch.float32)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, num_blocks_override=50, max_model_len=200)

    class Poisoned(Recorder):
        def sample(self, rows: Ints, logits: torch.Tensor) -> Int32s:
            poisoned = logits.clone()
            poisoned[self.sampling.seed[rows] == 2] = torch.nan
            return super().sample(rows, poisoned)

    engine = EngineCore(config, RecordingExecutor(Poisoned(model, config)))
    messages = engine.step([request(1, [5, 6, 7], 4, 0.0), request(2, [8, 9], 4, 0.0)], 0)
    failed = [message for _, message in messages if isinstance(message, RequestFailed)]
    assert [message.number for message in failed] == [2]
    assert "not finite" in failed[0].message
    alone = EngineCore(config, RecordingExecutor(Recorder(model, config)))
    expected = drain(alone, [request(1, [5, 6, 7], 4, 0.0)])[1]
    first = np.frombuffer(next(m for _, m in messages if isinstance(m, Outputs)).tokens, "<i4").tolist()
    assert first + drain(engine, [])[1] == expected


def test_the_local_executor_says_what_it_runs() -> None:
    executor = LocalExecutor(EngineConfig(dtype="bfloat16", threads=1))
    assert executor.info.numerics == "L2"
    assert executor.info.vocab_size == 49_152
    per_block = 2 * 30 * 16 * 3 * 64 * 2  # K and V, layers, tokens, KV heads, head size, bytes
    assert executor.determine_num_available_blocks(100 * per_block + 5, 16) == 100


EDITS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.6,
    "logit_bias": {7: 3.0, 11: 2.5, 13: -100.0},
    "bad_words_token_ids": [[7, 7], [11, 7], [42]],
    "min_tokens": 1,
}


def test_a_request_with_penalties_is_its_own_too() -> None:
    """Its counts follow it through neighbours with and without options, chunks, preemption and the prefix cache."""
    model = tiny_model(torch.float32)

    def options(number: int) -> dict[str, Any]:
        return EDITS if number % 2 == 0 else {}

    def edited(messages: list[tuple[int, AddRequest]]) -> list[tuple[int, AddRequest]]:
        return [
            (client, msgspec.structs.replace(m, params=msgspec.structs.replace(m.params, **options(m.number))))
            for client, m in messages
        ]

    target: dict[str, Any] = {"params": EDITS, "max_tokens": 40}
    alone = run(model, PROMPT, **target)
    plain = run(model, PROMPT, max_tokens=40)
    assert alone.tokens != plain.tokens
    crowd = run(model, PROMPT, neighbours=edited(neighbours(32, 1, 200, 40)), **target)
    squeezed = run(model, PROMPT, neighbours=edited(neighbours(9, 3, 30, 90)), num_blocks=36, budget=60, **target)
    assert squeezed.num_preemptions > 0
    chunked = run(model, PROMPT, budget=37, **target)
    cached = run(model, PROMPT, first=edited([request(2, PROMPT[:290], 3, 0.0)]), **target)
    assert cached.num_cached_tokens > 200
    for got in (crowd, squeezed, chunked, cached):
        assert got.tokens == alone.tokens
