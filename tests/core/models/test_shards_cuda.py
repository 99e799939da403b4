"""Models computed by several GPUs: every bit is that of one, whatever their number. Ranks are threads here, which take
turns: the interpreter, or the one device, is theirs in common."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from core.adapters.adapter import AdapterWeights, digest_of
from core.models.config import HeadSizes, ModelConfig, PerLayerParts, RecurrentParts
from core.models.device_model import device_model
from core.models.layers.adapted import AdaptedMatrices, AdaptedPart
from core.models.llama import Llama
from core.models.operations.operations import AdaptingOperations
from core.models.operations.token_adapters import TokenAdapters
from core.models.operations.weight_form import WeightForm
from core.models.parts.rank import Rank
from core.models.parts.recurrent_part import most_ranks
from core.models.parts.shard import Shard
from core.models.step import GivenRows, ModelInputs, StepResult
from ipc.errors import ConfigError
from ipc.options.config import KVCacheDtype
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from kernels.low_rank import LowRank
from kernels.torch.group import DeviceGroup
from tests.core.adapters.peft_files import random_matrices
from tests.core.executors.test_cuda_architectures import VOCAB, OnDevice, logits, shape_config
from tests.core.models.test_llama import random_weights
from tests.placed import PREFIX
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = ANYWHERE


class Turns:
    """Where the threads of a group meet. One of them runs at a time, until all have something to exchange."""

    def __init__(self, size: int) -> None:
        self.size, self._turn, self._barrier = size, threading.Lock(), threading.Barrier(size, timeout=60)
        self._given: list[torch.Tensor] = [torch.empty(0)] * size
        self.num_exchanges = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        with self._turn:
            try:
                yield
            except BaseException:
                self._barrier.abort()
                raise

    def exchange(self, rank: int, own: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = own.clone()
        self.num_exchanges += rank == 0
        self._turn.release()
        try:
            self._barrier.wait()
            every = list(self._given)
            self._barrier.wait()
        finally:
            self._turn.acquire()
        return every


class ThreadGroup(DeviceGroup):
    """The exchanges of a rank that is a thread."""

    def __init__(self, rank: int, turns: Turns) -> None:
        super().__init__(turns.size, DEVICE)
        self._rank, self._turns = rank, turns

    def _gather_bytes(self, every: torch.Tensor, own: torch.Tensor) -> None:
        every.view(self._size, -1).copy_(
            torch.stack([part.flatten() for part in self._turns.exchange(self._rank, own)])
        )

    def _add_words(self, words: torch.Tensor) -> None:
        words.copy_(torch.stack(self._turns.exchange(self._rank, words)).sum(0, dtype=torch.int32))


def by_ranks(size: int, work: Callable[[Rank], Any]) -> Sequence[Any]:
    """Return what each rank's work returns."""
    turns = Turns(size)

    def run(rank: int) -> Any:
        with turns.taken():
            return work(Rank(Shard(rank, size), ThreadGroup(rank, turns)))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def delta(num_heads: int, num_groups: int, *, takes_turns: bool = False) -> RecurrentParts:
    heads: dict[str, Any] = {"num_heads": num_heads, "num_groups": num_groups, "takes_turns": takes_turns}
    channels = 2 * num_groups * 8 + num_heads * 20
    own: dict[str, Any] = {"taps": 4, "key_dim": 8, "value_dim": 20, "channels": channels, "has_bias": True}
    return RecurrentParts(kind="gated delta", layers=(0,), **own, **heads)


#: A Llama whose columns, heads and words no number of ranks divides; one with biases, head norms, a tied head and as
#: many KV heads as query heads; an output gate, norms after each half, windows and MLPs without gates; and layers with
#: recurrent states before one that attends.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": VOCAB + 5, "intermediate_size": 133},
    "qwen3": {},
    "gates": {
        "output_gate": True,
        "post_norms": True,
        "sliding_window": 20,
        "sliding_layers": (0,),
        "is_gated": False,
        "hidden_act": "relu2",
        "scale_embeddings": True,
    },
    "convolution": {"recurrent": RecurrentParts(kind="short convolution", layers=(0,), taps=3, channels=50)},
    "delta": {"recurrent": delta(num_heads=4, num_groups=2)},
    "delta in turns": {"recurrent": delta(num_heads=6, num_groups=3, takes_turns=True)},
}


def state_space(num_groups: int, *, has_norm: bool = True) -> RecurrentParts:
    heads: dict[str, Any] = {"num_heads": 6, "num_groups": num_groups, "has_norm": has_norm}
    own: dict[str, Any] = {"taps": 4, "key_dim": 8, "value_dim": 20, "channels": 2 * num_groups * 8 + 120}
    return RecurrentParts(kind="state space", layers=(0,), has_bias=True, **own, **heads)


#: Gemma 4's layers: heads of two sizes, K and V that layers share, V that is K, wide MLPs, and inputs of their own.
_OWN_LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "sliding_layers": (0, 2), "sliding_window": 20, "qk_norm": True}
_OWN_LAYERS |= {"full_heads": HeadSizes(1, 24), "value_norm": True, "post_norms": True, "layer_scales": True}
_OWN_LAYERS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "logits_cap": 3.0, "full_keys_are_values": True}
_OWN_LAYERS |= {"num_shared_layers": 2, "wide_mlps": True, "hidden_act": "gelu_pytorch_tanh"}
_OWN_LAYERS |= {"per_layer": PerLayerParts(width=16, vocab_size=VOCAB)}

MODELS |= {
    "layers of their own": _OWN_LAYERS,
    "places": {"position_table": True, "centred_norms": True, "norm_bias": True},
    "state space": {"recurrent": state_space(3)},
    "state space of one group": {"recurrent": state_space(1)},
    "state space without a norm": {"recurrent": state_space(2, has_norm=False)},
}


def config_of(kind: str) -> ModelConfig:
    base = shape_config(kind if kind == "qwen3" else "llama")
    own = {"num_hidden_layers": 2 if "recurrent" in MODELS[kind] else 1, **MODELS[kind]}
    return msgspec.structs.replace(base, **own)


def model(
    config: ModelConfig,
    dtype: Dtype,
    rank: Rank | None = None,
    stored: KVCacheDtype = "auto",
    form: WeightForm = WeightForm.DENSE,
) -> Llama:
    weights = random_weights(config, dtype)
    return device_model(config, weights, dtype, DEVICE, form, rank=rank, kv_cache_dtype=stored)


def check(
    kind: str,
    dtype: Dtype,
    sizes: Sequence[int],
    stored: KVCacheDtype = "auto",
    form: WeightForm = WeightForm.DENSE,
) -> None:
    config = config_of(kind)
    whole = model(config, dtype, stored=stored, form=form)
    expected = logits(OnDevice(whole))
    assert expected.isfinite().all()
    for size in sizes:

        def run(rank: Rank) -> tuple[str, torch.Tensor, int]:
            own = model(config, dtype, rank, stored, form)
            return own.variant, logits(OnDevice(own)), own.bytes_per_block(16)

        for variant, found, num_bytes in by_ranks(size, run):
            assert variant == whole.variant, "engines with any number of GPUs continue each other's requests"
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (kind, size)
            assert num_bytes <= whole.bytes_per_block(16)


@pytest.mark.parametrize(
    ("kind", "dtype", "sizes"),
    [
        ("llama", BFLOAT16, (2, 4)),
        ("qwen3", FLOAT32, (2,)),
        ("gates", FLOAT32, (3,)),
        ("convolution", FLOAT32, (2,)),
        pytest.param("delta", BFLOAT16, (3,), marks=pytest.mark.soak),
        ("delta in turns", FLOAT32, (2,)),
        ("layers of their own", FLOAT32, (2,)),
        pytest.param("places", FLOAT32, (2,), marks=pytest.mark.soak),
        ("state space", BFLOAT16, (2,)),
        ("state space of one group", FLOAT32, (3,)),
        pytest.param("state space without a norm", FLOAT32, (2,), marks=pytest.mark.soak),
    ],
)
def test_every_bit_is_that_of_one_device(kind: str, dtype: Dtype, sizes: Sequence[int]) -> None:
    check(kind, dtype, sizes)


@pytest.mark.parametrize(("kind", "dtype", "stored"), [("llama", BFLOAT16, "fp8"), ("gates", FLOAT32, "int8")])
def test_every_bit_with_a_cache_in_8_bits(kind: str, dtype: Dtype, stored: KVCacheDtype) -> None:
    """A rank stores the heads that it has, each with a scale of its own."""
    check(kind, dtype, (2,), stored)


def test_every_bit_with_weights_and_activations_in_fp8() -> None:
    """A rank quantizes the rows that it has, and all of what it multiplies."""
    check("llama", BFLOAT16, (2,), form=WeightForm.FP8)


class Given(OnDevice):
    """Every third token of a step has a given embedding, and what is added to it after the first layer."""

    def forward(self, inputs: ModelInputs) -> StepResult:
        ids = inputs.token_ids.copy()
        places = np.arange(0, len(ids), 3)
        ids[places] = -1 - np.arange(len(places))
        rows = np.random.default_rng(3).standard_normal((len(places), 2 * self._model.config.hidden_size), np.float32)
        given = GivenRows(torch.from_numpy(places).to(DEVICE), torch.from_numpy(rows).to(DEVICE))
        return super().forward(inputs._replace(token_ids=ids, given=given))


def test_every_bit_with_given_embeddings() -> None:
    config = config_of("llama")
    plain = model(config, FLOAT32)
    assert plain.reads_features
    expected = logits(Given(plain), 9)
    assert not torch.equal(expected, logits(OnDevice(plain), 9))
    for found in by_ranks(2, lambda rank: logits(Given(model(config, FLOAT32, rank)), 9)):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.soak
@pytest.mark.parametrize("stored", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("kind", MODELS)
def test_every_bit_at_any_size(kind: str, dtype: Dtype, stored: KVCacheDtype) -> None:
    recurrent = config_of(kind).recurrent
    check(kind, dtype, range(1, 7 if recurrent is None else min(6, most_ranks(recurrent)) + 1), stored)


class Adapted(OnDevice):
    """Each token has one adapter, of all matrices."""

    def __init__(self, model: Llama, whole: ModelConfig, shard: Shard | None = None) -> None:
        super().__init__(model)
        assert isinstance(model.operations, AdaptingOperations)
        rows = () if shard is None else shard.adapted_rows(whole)
        part = AdaptedPart(range(whole.num_hidden_layers), rows)
        matrices = AdaptedMatrices(whole, model.operations, part=part)
        pairs = random_matrices(matrices.shapes, 5, 1, targets={name.rsplit(".", 1)[-1] for name in matrices.shapes})
        low_rank = {name: LowRank(a, b, 0.75) for name, (a, b) in pairs.items()}
        self._adapter = matrices.pack(AdapterWeights(low_rank, digest_of(low_rank)))

    def forward(self, inputs: ModelInputs) -> StepResult:
        every = TokenAdapters((self._adapter,), np.zeros(len(inputs.token_ids), np.int64))
        return super().forward(inputs._replace(adapters=every))


@pytest.mark.parametrize("kind", ["delta in turns", pytest.param("llama", marks=pytest.mark.soak)])
def test_every_bit_with_an_adapter(kind: str) -> None:
    """Its matrices are divided like those that they change; some read columns of all ranks."""
    config = config_of(kind)
    plain = model(config, FLOAT32)
    expected = logits(Adapted(plain, config), 9)
    assert not torch.equal(expected, logits(OnDevice(plain), 9))
    for found in by_ranks(2, lambda rank: logits(Adapted(model(config, FLOAT32, rank), config, rank.shard), 9)):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_columns_are_gathered_and_rows_are_joined() -> None:
    """Minus zero and what is no number keep their bits."""
    widths = [3, 1, 2]
    whole = torch.tensor(np.random.default_rng(1).standard_normal((2, 6), np.float32), device=DEVICE)
    whole[0, 0], whole[1, 5] = -0.0, torch.nan
    ends = np.cumsum(widths)

    def run(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, int]:
        group, number = rank.memory, rank.shard.rank
        assert isinstance(group, DeviceGroup)
        own = whole[:, ends[number] - widths[number] : ends[number]]
        elsewhere = torch.arange(len(whole)) % 3 != number
        rows = whole.masked_fill(elsewhere[:, None], 7.0)
        return group.gather(own, widths), group.join_rows(rows, elsewhere), group.now()

    found = by_ranks(3, run)
    for gathered, joined, _ in found:
        assert torch.equal(gathered.view(torch.int32), whole.view(torch.int32))
        assert torch.equal(joined.view(torch.int32), whole.view(torch.int32))
    assert len({time for *_, time in found}) == 1, "the ranks have a clock in common"


def test_a_device_whose_products_are_not_ordered_has_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{PREFIX}core.models.device_model.products_are_ordered", lambda *_: False)
    group: Any = None
    with pytest.raises(ConfigError, match="needs numerics level L2, which this device lacks"):
        model(config_of("llama"), FLOAT32, Rank(Shard(0, 2), group))
