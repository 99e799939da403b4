"""Stages of a pipeline: golden logits by hash for 1, 2 and 3 stages, and which layers and weights a stage has."""

import hashlib
from collections import deque
from collections.abc import Mapping

import gguf
import msgspec
import numpy as np
import pytest

from core.models.config import ModelConfig, PerLayerParts
from core.models.llama import Llama
from core.models.operations.stored_matrix import StoredMatrix, StoredPart, Weight
from core.models.parts.stage import Stage, layers_of_stages
from core.models.parts.stage_link import StageLink
from core.models.parts.stage_llama import StageLlama
from core.models.parts.stage_streams import StageStreams
from core.models.step import ModelInputs, TappedResult
from ipc.errors import ConfigError
from ipc.machine.channel import Channel
from ipc.tables.arrays import Floats
from kernels.cpu.library import load_cpu_library
from kernels.elements import BFLOAT16
from kernels.recurrence import StateRows
from tests.core.runner.invariance import DTYPES, KINDS, TINY, random_model, random_weights
from tests.in_turn import in_turn

_BLOCK = 16
_PROMPTS = (200, 37, 1)  # tokens; the windows of KINDS end within the first
_NUM_STEPS = 3  # after the prompts


def thrice(config: ModelConfig) -> ModelConfig:
    """The same layers three times."""
    own, count = config.recurrent, config.num_hidden_layers
    assert own is not None, config
    layers = tuple(layer + shift for shift in (0, count, 2 * count) for layer in own.layers)
    more = {"recurrent": msgspec.structs.replace(own, layers=layers), "file_layers": 3 * config.file_layers}
    return msgspec.structs.replace(config, num_hidden_layers=3 * count, **more)


def after_two_layers(config: ModelConfig) -> ModelConfig:
    """The same layers after two more, of which the first has a window."""
    sliding = (0, *(layer + 2 for layer in config.sliding_layers))
    gates = (1.1, None, *config.sparse_gates) if config.sparse_gates else ()
    count = config.num_hidden_layers + 2
    return msgspec.structs.replace(config, num_hidden_layers=count, sliding_layers=sliding, sparse_gates=gates)


#: Architectures: without windows; with head norms and biases; with sliding layers and norms after; with experts; with
#: latent attention; with recurrent layers, also without MLPs.
_KINDS = {
    kind: KINDS[kind] for kind in ("untied head", "head norms", "local and global", "experts", "latent attention")
}
#: As Gemma 4 26B: heads of two sizes, of which a stage may have one only, and experts alongside dense MLPs.
_KINDS["experts beside"] = KINDS["experts beside"]
#: Three times the layers of those with recurrent states, so that each of three stages has one with attention.
_KINDS |= {kind: thrice(KINDS[kind]) for kind in ("short convolution", "gated delta", "state space")}
#: As Gemma 4 E2B and Gemma 3n, with layers before those that share K and V, so that there are three parts.
_KINDS["shared keys and values"] = after_two_layers(KINDS["shared keys and values"])
_KINDS["streams and sparse gates"] = after_two_layers(KINDS["streams and sparse gates"])


class Queue(Channel):
    """Keeps what is sent until it is received: one thread runs all stages, and they send more than a socket takes."""

    def __init__(self) -> None:
        self._frames = deque[bytes]()

    def send(self, message: bytes) -> None:
        self._frames.append(message)

    def receive(self) -> bytes:
        return self._frames.popleft()


def staged(kind: str, dtype: str, size: int) -> list[StageLlama]:
    """The stages of a model, all in this process; of one stage: it is first and last."""
    return stages_of(_KINDS[kind], random_weights(_KINDS[kind], DTYPES[dtype]), dtype, size)


def stages_of(config: ModelConfig, weights: Mapping[str, Weight], dtype: str, size: int) -> list[StageLlama]:
    queues, stages = [None, *(Queue() for _ in range(size - 1)), None], list[StageLlama]()
    for number in range(size):
        stage = Stage(number, size, StageLink(queues[number], queues[number + 1]))
        reads = stage.reads(config)
        own = [(name, weight) for name, weight in weights.items() if reads(name)]
        of_stage = StageLlama if config.streams is None else StageStreams
        stages.append(of_stage(config, own, DTYPES[dtype], stage, library=load_cpu_library()))
        stages[-1].is_linked = True
    return stages


def logits(models: list[Llama] | list[StageLlama], *, are_tapped: bool = False) -> str:
    """The hash of all logits of some steps: prompts, the first of them in chunks, then tokens one by one.

    are_tapped: of the hidden states that tap() keeps, too.
    """
    caches = [model.allocate_cache(64, _BLOCK) for model in models]
    states = [model.allocate_states(len(_PROMPTS)) for model in models]
    rng, found, computed = np.random.default_rng(1), hashlib.sha256(), [0] * len(_PROMPTS)
    tables = np.arange(1, 1 + 3 * 16, dtype=np.int32).reshape(3, 16)
    steps = [[129, 37, 0], [71, 0, 1], *([1, 1, 1] for _ in range(_NUM_STEPS))]
    for counts in steps:
        rows = [row for row, count in enumerate(counts) if count]
        positions = np.concatenate([np.arange(computed[row], computed[row] + counts[row]) for row in rows])
        owners = np.repeat(rows, [counts[row] for row in rows])
        slots = tables[owners, positions // _BLOCK].astype(np.int64) * _BLOCK + positions % _BLOCK
        for row in rows:
            computed[row] += counts[row]
        num_tokens = np.array([counts[row] for row in rows])
        token_ids, last = rng.integers(3, 400, len(positions)), np.cumsum(num_tokens) - 1
        contexts = np.array([computed[row] for row in rows])
        firsts = np.concatenate(([0], np.cumsum(num_tokens)))
        for model, cache, own in zip(models, caches, states, strict=True):
            work = model.attention_metadata(num_tokens, contexts, tables[rows], cache)
            requests = None if own is None else StateRows(own, np.array(rows), firsts)
            result = model.forward(ModelInputs(token_ids, positions, slots, work, cache, last, requests=requests))
        found.update(np.ascontiguousarray(result.logits).tobytes())
        if are_tapped:
            assert isinstance(result, TappedResult)
            found.update(_others(result.states_of(np.arange(len(positions) // 2))))
        found.update(_others(result.logits_of(np.arange(0, len(positions), 3))))
    return found.hexdigest()


def _others(numbers: Floats) -> bytes:
    return np.ascontiguousarray(numbers).tobytes()


@pytest.mark.parametrize(("kind", "dtype"), in_turn(_KINDS, DTYPES))
def test_logits_of_stages_have_the_bits_of_one_process(kind: str, dtype: str) -> None:
    whole = random_model(_KINDS[kind], DTYPES[dtype])
    golden = logits([whole])
    for size in (2, 3):
        stages = staged(kind, dtype, size)
        assert logits(stages) == golden, size
        assert stages[-1].variant == whole.variant
        assert stages[-1].windows_of_model == whole.windows


@pytest.mark.parametrize("kind", ["untied head", "experts"])
def test_the_last_stage_has_the_hidden_states_of_all(kind: str) -> None:
    """For a head that makes drafts: some places are read twice, and not in the order of the layers."""
    whole, places = random_model(_KINDS[kind], DTYPES["bfloat16"]), (3, 1, 2, 1)
    whole.tap(places)
    golden = logits([whole], are_tapped=True)
    for size in (1, 2, 3):
        stages = staged(kind, "bfloat16", size)
        for stage in stages:
            stage.tap(places)
        assert logits(stages, are_tapped=True) == golden, size


@pytest.mark.parametrize(("dtype", "table"), [("float32", "BF16"), ("float32", "Q8_0"), ("bfloat16", "Q8_0")])
def test_a_stage_reads_its_columns_of_a_stored_table(dtype: str, table: str) -> None:
    """Inputs of single layers: the table stays in the file, or the columns of the stage's layers are converted."""
    kind = _KINDS["shared keys and values"]
    config = msgspec.structs.replace(kind, per_layer=PerLayerParts(width=32, vocab_size=3000))
    weights = random_weights(config, DTYPES[dtype])
    rows = np.random.default_rng(3).standard_normal((3000, 32 * config.num_hidden_layers), np.float32)
    if table == "Q8_0":
        data = np.ascontiguousarray(gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0))
        stored = StoredMatrix([StoredPart(table, data, rows.shape[1], load_cpu_library())])
    else:
        stored = StoredMatrix.of(rows.astype(BFLOAT16))
    weights["model.embed_tokens_per_layer.weight"] = stored
    whole = Llama(config, weights.items(), DTYPES[dtype], library=load_cpu_library())
    assert logits(stages_of(config, weights, dtype, 3)) == logits([whole])


def test_a_stage_that_changes_one_number_fails_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = StageLink.receive

    def spoilt(link: StageLink, room: Floats) -> None:
        receive(link, room)
        room[-1, 0] = np.nextafter(room[-1, 0], np.float32(np.inf))

    stages = staged("untied head", "float32", 2)
    golden = logits(stages)
    monkeypatch.setattr(StageLink, "receive", spoilt)
    assert logits(stages) != golden


def test_layers_are_divided_by_weights() -> None:
    deep = msgspec.structs.replace(TINY, num_hidden_layers=12, vocab_size=8)
    assert [one.length for one in layers_of_stages(deep, 3)] == [4, 4, 4]
    head = msgspec.structs.replace(deep, vocab_size=3 * (2 * 8 * 16 + 3 * 192))  # as large as three layers
    assert [one.length for one in layers_of_stages(head, 3)] == [5, 5, 2]
    assert [one.length for one in layers_of_stages(head, 12)] == [1] * 12
    shared = {"num_shared_layers": 6, "sliding_layers": tuple(range(0, 12, 2)), "sliding_window": 9}
    sharing = msgspec.structs.replace(deep, **shared)
    assert [one.length for one in layers_of_stages(sharing, 3)] == [2, 2, 8]  # layers from 6 on read K and V of 4 and 5
    with pytest.raises(ConfigError, match="pipeline_parallel_size=13 is more than the model's 12 layers"):
        layers_of_stages(head, 13)


def test_a_stage_reads_and_stores_its_own_layers_only() -> None:
    kind = "local and global"
    whole, weights = random_model(KINDS[kind], DTYPES["float32"]), random_weights(KINDS[kind], DTYPES["float32"])
    stages = staged(kind, "float32", 3)
    assert [len(stage.layers) for stage in stages] == [1, 1, 1]
    assert sum(stage.bytes_per_block(_BLOCK) for stage in stages) == whole.bytes_per_block(_BLOCK)
    assert [stage.windows for stage in stages] == [(139,), (None,), (139,)]
    names = [set(filter(stage.stage.reads(KINDS[kind]), weights)) for stage in stages]
    assert set.union(*names) == set(weights)
    assert all(name.startswith("model.layers.1.") for name in names[1])
    ends = [("model.embed_tokens.weight" in own, "model.norm.weight" in own) for own in names]
    assert ends == [(True, False), (False, False), (True, True)]  # the head has the embeddings' weights
