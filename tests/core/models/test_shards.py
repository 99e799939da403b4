"""Models computed by groups of ranks: every bit is that of one process, whatever the number of ranks.

Each rank is a thread here, with C kernels of one thread; what they share is the memory of a real group.
"""

import hashlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest

from core.model_files.load_format import open_weights
from core.model_files.model_config import ModelConfig
from core.models.config import HeadSizes
from core.models.llama import Llama
from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from core.models.operations.weight_form import WeightForm
from core.models.parts.ranges import Range, part_of
from core.models.parts.rank import Rank
from core.models.parts.shard import Shard
from core.models.step import ModelInputs, StepResult, TappedResult
from ipc.errors import ConfigError
from ipc.tables.arrays import Ints
from ipc.tables.rounding import ceil_div
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.group import SeparateMemory, SharedMemory, make_shared_file
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.quantized import BlockRows, in_q8_0
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers, to_floats
from kernels.recurrence import StateRows
from tests.core.runner.invariance import DTYPES, KINDS, TINY
from tests.in_turn import in_turn
from tests.placed import PREFIX

BLOCK = 16
#: As Nemotron-H, with a table of positions.
STATE_SPACE = KINDS["state space"]
#: Experts of which two ranks have whole panels, and whose matrices consist of whole blocks.
_EXPERTS = msgspec.structs.replace(
    KINDS["experts"].experts, num_experts=6, intermediate_size=96, shared_size=64, has_shared_gate=True, dense_layers=()
)


def recurrent(kind: str, config: ModelConfig | None = None, **sizes: Any) -> ModelConfig:
    """The model of this kind, or this one, with other sizes of its recurrent layers."""
    config = config or KINDS[kind]
    assert config.recurrent is not None, kind
    return msgspec.structs.replace(config, recurrent=msgspec.structs.replace(config.recurrent, **sizes))


#: A Llama with 3 KV heads of 3 query heads each, head norms and biases (as Qwen 3 and 2), post norms with windows (as
#: Gemma 3), layer normalisations with MLPs beside attention (as GPT-NeoX), heads with norms of their own (as
#: Command-R+), norms of all heads together (as OLMo 2 and OLMo-Hybrid), gates of attention's output (as LFM3 and
#: Qwen 3.5), caps of logits (as Gemma 2), layers with recurrent states, routed MLPs (as Mixtral, Qwen3-Next, gpt-oss
#: and Nemotron-H), and latent attention (as DeepSeek V2 and V3).
MODELS = {
    "llama": msgspec.structs.replace(TINY, num_attention_heads=9, num_key_value_heads=3, head_dim=8, vocab_size=299),
    "qwen": msgspec.structs.replace(KINDS["head norms"], qkv_bias=True, tie_word_embeddings=False),
    "gemma": KINDS["local and global"],
    "neox": KINDS["beside attention"],
    "cohere": KINDS["centred head norms"],
    "phi": msgspec.structs.replace(TINY, fused_qkv=True, fused_gate_up=True),
    "gates": KINDS["gates of heads"],
    "olmo": KINDS["norms after"],
    "olmo hybrid": msgspec.structs.replace(KINDS["gated delta"], qk_norm=True, qk_norm_of_rows=True, output_gate=False),
    "caps": KINDS["soft caps"],
    "xielu": KINDS["recurrent layers with norms before"],
    "experts": KINDS["experts"],
    "experts with sinks": KINDS["sinks"],
    "fused experts": msgspec.structs.replace(KINDS["experts"], fused_gate_up=True),
    "experts and delta": msgspec.structs.replace(KINDS["gated delta"], experts=_EXPERTS),
    "shared keys and values": KINDS["shared keys and values"],
    "experts beside": KINDS["experts beside"],
    "shared keys and values of one head": msgspec.structs.replace(
        KINDS["shared keys and values"], num_attention_heads=8, num_key_value_heads=4, logits_cap=3.0, vocab_size=299
    ),
    "streams": KINDS["streams and sparse gates"],
    "latent": KINDS["latent attention"],
    "latent queries": KINDS["latent queries"],
    "latent of two tensors": msgspec.structs.replace(
        KINDS["latent queries"], latent=msgspec.structs.replace(KINDS["latent queries"].latent, is_split=True)
    ),
    "convolutions": KINDS["short convolution"],
    "delta": KINDS["gated delta"],
    "delta in turns": recurrent("gated delta", num_heads=6, num_groups=3, takes_turns=True, channels=3 * 32 + 6 * 40),
    "split delta": recurrent(
        "gated delta", has_split_convolution=True, inputs=("q_proj", "k_proj", "v_proj", "z_proj", "b_proj", "a_proj")
    ),
    "state space": STATE_SPACE,
    "state space of one group": recurrent(
        "state space", msgspec.structs.replace(STATE_SPACE, experts=None), num_groups=1, channels=192, has_norm=False
    ),
}


@pytest.fixture(scope="module")
def library() -> Iterator[CpuLibrary]:
    library = load_cpu_library()
    before = library.num_threads
    library.start_threads(1)
    yield library
    library.start_threads(before)


@lru_cache(maxsize=2)
def made_up(config: ModelConfig, dtype: Dtype) -> Sequence[tuple[str, Numbers]]:
    """Weights of a model, made once for all its ranks."""
    generator, weights = np.random.default_rng(7), list[tuple[str, Numbers]]()
    for name, weight in open_weights("dummy", None, config, dtype).tensors:  # type: ignore[arg-type]
        assert isinstance(weight, np.ndarray), name
        if weight.ndim == 1:  # norms and biases that tell columns apart
            weight = (weight + generator.standard_normal(weight.shape, np.float32) / 8).astype(np.float32)
        weight.flags.writeable = False
        weights.append((name, weight))
    return weights


def build(
    library: CpuLibrary,
    config: ModelConfig,
    dtype: Dtype,
    rank: Rank | None = None,
    *,
    form: WeightForm = WeightForm.STORED,
    in_blocks: bool = False,
) -> Llama:
    """in_blocks: matrices are stored as Q8_0."""
    weights: list[tuple[str, Numbers | StoredMatrix]] = []
    for name, weight in made_up(config, dtype):
        if in_blocks and weight.ndim == 2 and weight.shape[1] % 32 == 0:
            blocks = in_q8_0(library, BlockRows("F32", to_floats(weight).view(np.uint8)))
            assert blocks is not None, name
            weights.append((name, StoredMatrix([StoredPart("Q8_0", blocks.data, weight.shape[1], library)])))
        else:
            weights.append((name, weight))
    return Llama(config, weights, dtype, "L2", library=library, rank=rank, form=form)


def digest(model: Llama, config: ModelConfig) -> str:
    """Run chunks of a prompt and batches of 1, 8 and 32 rows; return the hash of all that comes out."""
    found, cache, states = hashlib.sha256(), model.allocate_cache(40, BLOCK), model.allocate_states(48)
    if states is not None:
        states.fill(0.0)
    generator = np.random.default_rng(3)
    assert cache.num_blocks == 40

    def step(positions: Ints, counts: list[int], lengths: list[int], tables: np.ndarray, rows: Ints) -> StepResult:
        columns = np.array(counts), np.array(lengths), tables.astype(np.int32)
        ids = generator.integers(0, config.vocab_size, len(positions))
        work = model.attention_metadata(*columns, cache)
        owners = np.repeat(np.arange(len(counts)), counts)
        slots = tables[owners, positions // BLOCK] * BLOCK + positions % BLOCK
        firsts = np.concatenate(([0], np.cumsum(counts)))
        requests = None if states is None else StateRows(states, len(counts) // 2 + np.arange(len(counts)), firsts)
        result = model.forward(ModelInputs(ids, positions, slots, work, cache, rows, requests=requests))
        found.update(result.logits.tobytes())
        found.update(np.asarray(result.largest).tobytes())
        return result

    model.tap((model.config.num_hidden_layers, 1))
    prompt = np.arange(1, 13)[None]
    result = step(np.arange(100), [100], [100], prompt, np.array([99]))
    result = step(np.arange(100, 180), [80], [180], prompt, np.array([3, 79]))
    if isinstance(result, TappedResult):
        found.update(result.states_of(np.array([5, 78])).tobytes())
    found.update(result.logits_of(np.array([0, 5, 78])).tobytes())
    found.update(result.hidden_of(np.array([1, 2])).tobytes())
    found.update(result.logits.tobytes())  # they are still there
    for size in (1, 8, 32):
        tables = np.concatenate([np.full((size, 1), 1), 13 + np.arange(size)[:, None] % 27], 1)
        step(np.full(size, 16), [1] * size, [17] * size, tables, np.arange(size))
    return found.hexdigest()


def in_group(size: int, run: Callable[[Rank], str]) -> list[str]:
    """Run the ranks of a group at the same time, each in a thread; return their results."""
    fd = make_shared_file()
    try:
        return at_once([Rank(Shard(rank, size), SharedMemory(fd)) for rank in range(size)], run)
    finally:
        os.close(fd)


def at_once(ranks: list[Rank], run: Callable[[Rank], str]) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [one.result(60) for one in [threads.submit(run, rank) for rank in ranks]]


@pytest.mark.parametrize(("name", "dtype"), in_turn(MODELS, DTYPES))
def test_logits_of_any_number_of_ranks_are_those_of_one(name: str, dtype: str, library: CpuLibrary) -> None:
    config = MODELS[name]
    alone = build(library, config, DTYPES[dtype])
    expected = digest(alone, config)
    for size in (2, 3):
        models: dict[int, Llama] = {}

        def run(rank: Rank, models: dict[int, Llama] = models) -> str:
            models[rank.shard.rank] = build(library, config, DTYPES[dtype], rank)
            return digest(models[rank.shard.rank], config)

        assert in_group(size, run) == [expected] * size
        assert {model.variant for model in models.values()} == {alone.variant}  # and so the fingerprint
        if config.latent is None:  # each rank has the whole latent vector
            assert all(model.bytes_per_block(BLOCK) < alone.bytes_per_block(BLOCK) for model in models.values())


@pytest.mark.parametrize("form", [WeightForm.STORED, WeightForm.INT8], ids=["stored", "int8"])
@pytest.mark.parametrize("name", ["experts and delta", "latent"])
def test_packed_matrices_of_ranks(name: str, form: WeightForm, library: CpuLibrary) -> None:
    config = MODELS[name]
    options: dict[str, Any] = {"form": form, "in_blocks": True}
    expected = digest(build(library, config, BFLOAT16, **options), config)
    made = build(library, config, BFLOAT16)
    assert expected != digest(made, config)  # it is another matrix
    assert in_group(2, lambda rank: digest(build(library, config, BFLOAT16, rank, **options), config)) == [expected] * 2


@pytest.mark.parametrize(
    "name",
    [
        *("convolutions", "delta in turns", "state space of one group", "state space", "experts and delta"),
        *("latent", "latent queries", "shared keys and values", "streams"),
    ],
)
def test_states_of_ranks_that_share_no_memory_are_those_of_one(name: str, library: CpuLibrary) -> None:
    """Only the first rank has logits then, and no rank asks for more of them."""
    config = msgspec.structs.replace(MODELS[name], vocab_size=64)
    expected = last_states(build(library, config, FLOAT32), config)
    near, far = socket.socketpair()
    with near, far:
        fds = [[-1, near.fileno()], [far.fileno(), -1]]
        ranks = [Rank(Shard(rank, 2), SeparateMemory(rank, fds[rank])) for rank in range(2)]
        assert at_once(ranks, lambda rank: last_states(build(library, config, FLOAT32, rank), config)) == [expected] * 2


@pytest.mark.parametrize("deep", [0, 2])
@pytest.mark.parametrize("name", ["llama", "shared keys and values"])
def test_given_embeddings_among_tokens_of_all_ranks(name: str, deep: int, library: CpuLibrary) -> None:
    config, count = MODELS[name], 40
    rows = np.random.default_rng(4).standard_normal((9, (1 + deep) * config.hidden_size), np.float32)
    ids = np.arange(count) * 13 % config.vocab_size
    ids[[*range(3, 8), *range(20, 24)]] = -1 - np.arange(9)

    def run(rank: Rank | None) -> str:
        model = build(library, config, FLOAT32, rank)
        assert model.reads_features
        cache, positions = model.allocate_cache(5, BLOCK), np.arange(count)
        work = model.attention_metadata(
            np.array([count]), np.array([count]), np.arange(1, 4, dtype=np.int32)[None], cache
        )
        inputs = ModelInputs(ids, positions, positions + BLOCK, work, cache, np.array([5, count - 1]), given=rows)
        result = model.forward(inputs)
        return hashlib.sha256(result.logits.tobytes() + result.hidden_of(positions).tobytes()).hexdigest()

    assert in_group(2, run) == [run(None)] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_meet_between_batches_of_rows_of_experts(size: int, library: CpuLibrary) -> None:
    config, count = MODELS["experts and delta"], 1200  # more than two batches of 512
    expected = last_states(build(library, config, BFLOAT16), config, count)
    found = in_group(size, lambda rank: last_states(build(library, config, BFLOAT16, rank), config, count))
    assert found == [expected] * size


def last_states(model: Llama, config: ModelConfig, count: int = 40) -> str:
    """Return the hash of the hidden states of a prompt of so many tokens."""
    num_blocks = ceil_div(count, BLOCK) + 1
    cache, states = model.allocate_cache(num_blocks, BLOCK), model.allocate_states(1)
    positions, tables = np.arange(count), np.arange(1, num_blocks, dtype=np.int32)[None]
    work = model.attention_metadata(np.array([count]), np.array([count]), tables, cache)
    requests = None if states is None else StateRows(states, np.zeros(1, np.int64), np.array([0, count]))
    ids, slots = positions % config.vocab_size, positions + BLOCK
    rows = np.append(np.arange(7, count - 1, 20), count - 1)
    result = model.forward(ModelInputs(ids, positions, slots, work, cache, rows, requests=requests))
    return hashlib.sha256(result.hidden_of(rows).tobytes()).hexdigest()


def test_a_group_that_adds_has_other_bits(library: CpuLibrary) -> None:
    """The control: split inputs, whose products are added, would not pass the test above."""
    config = MODELS["llama"]
    model = build(library, config, FLOAT32)
    expected = digest(model, config)
    model.decoder = None  # operation after operation: results have no `largest`
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{PREFIX}core.models.step.HiddenResult.largest", np.zeros(0, np.int32))
        one_by_one = digest(model, config)
        parts = list(open_weights("dummy", None, config, FLOAT32).tensors)  # type: ignore[arg-type]
        weights = {name: weight for name, weight in parts if isinstance(weight, np.ndarray)}
        layer = model.layers[0]
        weight = to_floats(weights["model.layers.0.mlp.down_proj.weight"])
        middle = weight.shape[1] // 2
        left, right = (PackedMatrix(library, np.ascontiguousarray(half)) for half in np.split(weight, [middle], 1))

        class Adding:
            variant = layer.mlp.down.variant

            def __call__(self, x: np.ndarray) -> np.ndarray:
                halves = (np.ascontiguousarray(half) for half in np.split(x, [middle], 1))
                return left(next(halves)) + right(next(halves))

        model.layers[0] = replace(layer, mlp=replace(layer.mlp, down=Adding()))
        added = digest(model, config)
    assert one_by_one != added
    assert expected != added


def test_heads_are_shared_out_whole() -> None:
    config = msgspec.structs.replace(TINY, num_attention_heads=9, num_key_value_heads=3)

    def own(shard: Shard) -> tuple[Range, Range]:
        return shard.heads(config), shard.kv_heads(config, 3)

    for size in range(1, 10):
        parts = [own(Shard(rank, size)) for rank in range(size)]
        heads = [head for own, _ in parts for head in range(own.first, own.last)]
        assert heads == list(range(9))  # each once, in order
        for queries, kv in parts:
            assert queries.length % kv.length == 0
            assert queries.length > 0
            assert all(kv.first <= head // 3 < kv.last for head in range(queries.first, queries.last))
    assert [own(Shard(rank, 2)) for rank in range(2)] == [((0, 3), (0, 1)), ((3, 9), (1, 3))]


@pytest.mark.parametrize(("num_heads", "full", "sliding"), [(16, 2, 8), (32, 4, 16), (8, 1, 1), (8, 1, 2), (12, 6, 2)])
def test_heads_of_two_kinds_of_layers_are_shared_out_whole(num_heads: int, full: int, sliding: int) -> None:
    config = msgspec.structs.replace(
        TINY, num_attention_heads=num_heads, num_key_value_heads=sliding, full_heads=HeadSizes(full, 32)
    )
    for size in range(1, num_heads + 1):
        shards = [Shard(rank, size) for rank in range(size)]
        heads = [shard.heads(config) for shard in shards]
        assert [head for own in heads for head in range(own.first, own.last)] == list(range(num_heads))
        for count in (full, sliding):
            for own, kv in zip(heads, [shard.kv_heads(config, count) for shard in shards], strict=True):
                assert own.length % kv.length == 0
                assert own.length > 0
                each = num_heads // count
                for head in range(own.length):  # attention finds a query's KV head so
                    assert (own.first + head) // each == kv.first + head // (own.length // kv.length)
    assert [Shard(rank, 3).heads(config) for rank in range(3)][-1].last == num_heads


@pytest.mark.parametrize("count", [1, 31, 64, 576, 49_152, 49_153])
def test_columns_are_shared_out_in_panels(count: int) -> None:
    for size in range(1, min(count, 9) + 1):
        parts = [part_of(count, rank, size, 32) for rank in range(size)]
        assert [parts[0].first, *(one.last for one in parts)] == [*(one.first for one in parts), count]
        assert all(one.length > 0 for one in parts)
        if count >= 32 * size:
            assert all(one.first % 32 == 0 for one in parts)


def test_rows_of_a_stored_matrix_of_parts() -> None:
    numbers = np.arange(40, dtype=np.float32).reshape(10, 4)
    parts = [part for half in (numbers[:3], numbers[3:]) for part in StoredMatrix.of(half).parts]
    for first, last in ((0, 10), (1, 3), (2, 5), (3, 4), (9, 10)):
        assert np.array_equal(StoredMatrix(parts).rows(first, last).dense(FLOAT32), numbers[first:last])


def test_a_weight_that_is_not_known_is_refused() -> None:
    """Its part would be guessed: of experts that the config does not have, of norms with a weight for each head."""
    parts = {
        "model.layers.1.mlp.experts.3.gate_proj.weight": np.zeros((4, 96), np.float32),
        "model.layers.0.self_attn.q_norm.weight": np.zeros(TINY.num_attention_heads * TINY.head_dim * 2, np.float32),
    }
    for name in parts:
        with pytest.raises(ConfigError, match="does not support models with " + re.escape(name)):
            Shard(0, 2).parts(TINY, parts.items()).take(name)
