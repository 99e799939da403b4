"""Numerics level L2 on a GPU: logits of a request that is whole and alone, and in pieces next to others, have the same
bits. In CI the kernels run under Triton's interpreter, with the products of a tensor core."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from core.models.operations.triton_operations import TritonOperations
from core.runner import cuda_model_runner, device_columns
from ipc.params.sampling_params import SamplingParams
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from kernels.triton import attention_work, decode_attention, prefill_attention
from kernels.triton.attention_work import SPLIT
from kernels.triton.kv_cache import Fp8KVCache, Int8KVCache, TritonKVCache
from kernels.triton.routed import expert_products
from kernels.triton.shared_prefix import shared_prefix
from tests.core.executors import test_cuda_executor as engine
from tests.core.executors.test_cuda_architectures import SHAPES, VOCAB, OnDevice, built, shape_config
from tests.core.models.test_llama import Requests, prompts, random_weights
from tests.triton_device import ANYWHERE, DEVICE, ON_GPU

pytestmark = ANYWHERE


def model(kind: str, dtype: Dtype, *, num_layers: int | None = None, **options: Any) -> OnDevice:
    """num_layers: None = those of the shape. options: of TritonOperations."""
    config = shape_config(kind)
    if num_layers is not None:
        config = msgspec.structs.replace(config, num_hidden_layers=num_layers)
    weights = dict(random_weights(config, dtype))
    return OnDevice(built(config, weights, dtype, TritonOperations(config, dtype, DEVICE, **options)))


def differing(one: OnDevice, split: int = SPLIT) -> int:
    """Logits of a request whose bits are others in pieces and in company. Its context passes the end of a split."""
    whole, pieces = split + 19, ({0: 1}, {1: 9, 0: 3}, {0: split - 5, 2: 1}, {0: 1, 1: 1}, {2: 4, 0: 1}, {0: 17, 1: 30})
    given = prompts(whole, 40, 6, vocab_size=VOCAB)
    alone = Requests(one, given[:1]).step({0: whole})[0]
    company = Requests(one, given, seed=1)
    others = torch.cat([company.step(counts)[0] for counts in (*pieces, {0: 1})])
    assert alone.isfinite().all()
    return int((alone.view(torch.int32) != others.view(torch.int32)).sum())


def use_splits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of so many tokens: the interpreter calls Python for each token and norm, so long contexts take long."""
    for module in (attention_work, decode_attention, prefill_attention):
        monkeypatch.setattr(module, "SPLIT", size)


@pytest.mark.parametrize(("kind", "dtype", "split"), [("gpt-oss", BFLOAT16, 64), ("mixtral", FLOAT32, 32)])
def test_no_bit_differs_in_pieces_and_in_company(
    kind: str, dtype: Dtype, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_splits(split, monkeypatch)
    one = model(kind, dtype, num_layers=1)
    assert differing(one, split) == 0
    if not ON_GPU and kind == "mixtral":  # on a GPU the compiler may join the sums
        monkeypatch.setattr(expert_products, "dot", add_a_product)
        assert differing(one, split) > 100


@pytest.mark.parametrize(("cache_type", "dtype", "split"), [(Int8KVCache, FLOAT32, 32), (Fp8KVCache, BFLOAT16, 64)])
def test_no_bit_differs_with_a_cache_in_8_bits(
    cache_type: type[TritonKVCache], dtype: Dtype, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_splits(split, monkeypatch)
    coded, usual = (model("llama", dtype, num_layers=1, cache_type=each) for each in (cache_type, TritonKVCache))
    assert differing(coded, split) == 0
    given = prompts(20, vocab_size=VOCAB)
    found, expected = (Requests(one, given).step({0: 20})[0] for one in (coded, usual))
    assert not torch.equal(found, expected)
    assert torch.corrcoef(torch.stack((found.flatten(), expected.flatten())))[0, 1] > 0.99
    assert coded._model.variant == f"{usual._model.variant} kv={cache_type.stored_as}"


def test_splits_in_common_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine, for requests that find the first one's blocks; log probabilities have the same bits."""
    use_splits(32, monkeypatch)
    for module in (cuda_model_runner, device_columns):
        monkeypatch.setattr(module, "SPLIT", 32)
    begin, params = engine.ids(35, 1), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    requests = [([*begin, 7 * number], params) for number in range(3, 6)]
    calls: list[int] = []

    def counted(q: torch.Tensor, *others: Any, **options: Any) -> None:
        calls.append(len(q))
        shared_prefix(q, *others, **options)

    monkeypatch.setattr(decode_attention, "shared_prefix", counted)
    together = engine.run("triton", requests, depth=2)
    assert calls
    assert max(calls) == 3
    monkeypatch.setattr(cuda_model_runner, "common_splits", lambda *_: ())
    calls.clear()
    apart = engine.run("triton", requests, depth=2)
    assert (together.tokens, together.logprobs) == (apart.tokens, apart.logprobs)
    assert not calls


@pytest.mark.parametrize(
    ("counts", "lengths", "num_blocks", "expected"),
    [
        ([1, 1], [300, 257], 16, [1]),
        ([1, 1], [300, 256], 16, []),  # the second one's last token is in the split
        ([1, 7, 1], [600, 20, 900], 40, [2]),
        ([1, 7], [600, 600], 40, []),  # one decoding row
    ],
)
def test_whole_splits_of_decoding_rows_are_in_common(
    counts: list[int], lengths: list[int], num_blocks: int, expected: list[int]
) -> None:
    rows, ends = np.arange(len(counts)), np.array(lengths)
    columns = device_columns.step_columns(rows, np.array(counts, np.int32), ends, rows)
    plan: Any = SimpleNamespace(num_common_prefix_blocks=num_blocks)
    found = device_columns.common_splits(plan, columns, 16)
    assert [count for column in found for count in column.tolist()] == expected


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("cache_type", [TritonKVCache, Int8KVCache, Fp8KVCache])
def test_no_bit_differs_for_any_architecture(cache_type: type[TritonKVCache], kind: str, dtype: Dtype) -> None:
    assert differing(model(kind, dtype, cache_type=cache_type)) == 0


@triton.jit
def add_a_product(a, b, sums):  # type: ignore[no-untyped-def]
    """A chain that begins again in each tile."""
    return sums + tl.dot(a, b, input_precision="ieee")


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt-oss", "mixtral"])
def test_with_torchs_products_bits_differ(kind: str) -> None:
    assert differing(model(kind, FLOAT32, is_exact=False)) > 10_000


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt-oss"])
def test_without_the_splits_of_decode_bits_differ(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_attention, "SPLIT", 1 << 20)
    assert differing(model(kind, FLOAT32)) > 100


def test_levels_have_names() -> None:
    exact, plain = (model("llama", FLOAT32, is_exact=is_exact)._model for is_exact in (True, False))
    assert (exact.numerics, plain.numerics) == ("L2", "L0")
    assert "ordered.2" in exact.variant
    assert f"torch={torch.__version__}" in plain.variant
    assert torch.__version__ not in exact.variant
