"""The KV cache in pinned memory of the host, and its rows in 8 bits: as codes with scales, and as e4m3."""

from copy import copy
from typing import Any

import pytest
import torch

from kernels.cpu.quantized_kv_cache import quantized
from kernels.elements import FLOAT32
from kernels.memory.kv_cache import Scales
from kernels.torch.kv_cache import TorchKVCache
from kernels.torch.tensors import DTYPES, element_type, to_array
from kernels.triton.attention_work import SPLIT
from kernels.triton.kv_cache import Fp8KVCache, Int8KVCache, TritonKVCache
from kernels.triton.latent import store_latent
from kernels.triton.rope import TritonRope
from tests.kernels.triton.test_attention import MIXED, Shape, attend, batch, work_of
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = ANYWHERE

LARGEST = 448.0


def to_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    """The definition, by torch: uint8."""
    finite = torch.where(numbers.float().isfinite(), numbers.float().clamp(-LARGEST, LARGEST), torch.nan)
    codes = finite.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(finite.isnan(), 0x7F, codes)  # one NaN


def stored(cache_type: type[TritonKVCache], plain: TorchKVCache) -> tuple[TritonKVCache, TorchKVCache]:
    """A cache with plain's numbers in this form, and one with the numbers that its reads must give."""
    kv_heads, size, head_dim = plain.layers[0].shape[2:]
    cache = cache_type(1, plain.num_blocks, size, kv_heads, head_dim=head_dim, dtype=plain.dtype, device=DEVICE)
    read, numbers = copy(plain), plain.layers[0]
    if cache_type is Fp8KVCache:
        codes = to_e4m3(numbers)
        cache.layers[0].copy_(codes)
        read.layers = [codes.view(torch.float8_e4m3fn).to(DTYPES[plain.dtype])]
        return cache, read
    codes, scales = (torch.from_numpy(each) for each in quantized(to_array(numbers)))
    padded = torch.zeros((*codes.shape[:-1], cache.layers[0].shape[-1] - 4), dtype=torch.int8)
    padded[..., :head_dim] = codes
    parts = padded.flatten(3), scales.contiguous().view(torch.int8).flatten(3)
    cache.layers[0].copy_(torch.cat(parts, 3).view(cache.layers[0].shape))
    read.layers = [(codes.float() * scales[..., None]).to(DTYPES[plain.dtype])]
    return cache, read


ENDS = [3 * 2**-11, 2**-6, 15 * 2**-10, 15.5 * 2**-10, 1.0625, 1.1875, -1.0625, 17.0, 19.0, -3 * 2**-10]
#: What rows may have: usual and small numbers, none, one that is not finite, the largest, ends of what e4m3 rounds.
ROWS = torch.stack(
    [
        *torch.randn(3, 20, generator=torch.Generator().manual_seed(7)) * torch.tensor([[1.0], [300.0], [1e-3]]),
        torch.zeros(20),
        torch.tensor([1e-32, -1e-33] * 10),
        torch.tensor([1.0, torch.inf] + [2.0] * 18),
        torch.tensor([torch.nan] + [3.0] * 19),
        torch.tensor([448.0, 449, 463.9, 464, 465, -480, 1e30, 0.0, 2**-9, 2**-10, *ENDS]),
    ]
)


@pytest.mark.parametrize("cache_type", [Int8KVCache, Fp8KVCache])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_rows_have_the_bits_of_the_definition(cache_type: type[TritonKVCache], dtype: torch.dtype) -> None:
    """Those of the C kernels for int8, torch's for e4m3: by rotation, of angle 0, and by latent attention."""
    rows, head_dim = ROWS.to(dtype), ROWS.shape[1]
    plain = TorchKVCache(2, 3, 4, 2, head_dim=head_dim, dtype=element_type(dtype))
    for layer in plain.layers:
        layer.fill_(0)
    keys, slots = torch.where(rows.isfinite(), rows, 0), torch.arange(4, 12)  # a rotation multiplies by 0
    qkv = torch.cat((keys, keys, keys.flip(0), rows.flip(0), rows), 1).contiguous()
    for token, slot in enumerate(slots.tolist()):
        plain.layers[0][slot // 4, 0, :, slot % 4] = torch.stack((keys[token], keys[-1 - token]))
        plain.layers[0][slot // 4, 1, :, slot % 4] = torch.stack((rows[-1 - token], rows[token]))
    expected, _ = stored(cache_type, plain)
    cache = cache_type(1, 3, 4, 2, head_dim=head_dim, dtype=element_type(dtype), device=DEVICE)
    cache.layers[0].zero_()
    angles = torch.ones(8, head_dim, device=DEVICE), torch.zeros(8, head_dim, device=DEVICE)
    TritonRope(1)(qkv.to(DEVICE), *angles, cache, 0, slots.to(DEVICE))
    assert bits(cache) == bits(expected)

    latent = TorchKVCache(1, 3, 4, 1, head_dim=head_dim, dtype=element_type(dtype))
    latent.layers[0].fill_(0)
    latent.layers[0][1:, 0, 0], latent.layers[0][1:, 1, 0] = rows.view(2, 4, -1), rows.view(2, 4, -1)
    cache = cache_type(1, 3, 4, 1, head_dim=head_dim, dtype=element_type(dtype), device=DEVICE)
    store_latent(rows.to(DEVICE), slots.to(DEVICE), cache, 0)
    assert bits(cache) == bits(stored(cache_type, latent)[0])


def test_rows_are_divided_by_the_scales_of_their_layer() -> None:
    plain = TorchKVCache(1, 3, 4, 2, head_dim=20, dtype=FLOAT32)
    keys, slots = torch.where(ROWS.isfinite(), ROWS, 0), torch.arange(4, 12)
    plain.layers[0][:] = 0
    plain.layers[0][1:, 0] = (keys / 0.75).view(2, 1, 4, 20)
    plain.layers[0][1:, 1] = (ROWS / 3).view(2, 1, 4, 20)
    cache = Fp8KVCache(1, 3, 4, 2, head_dim=20, dtype=FLOAT32, device=DEVICE)
    cache.scales = [Scales(0.75, 3.0)]
    angles = torch.ones(8, 20, device=DEVICE), torch.zeros(8, 20, device=DEVICE)
    TritonRope(1)(torch.cat((keys, keys, keys, ROWS, ROWS), 1).to(DEVICE), *angles, cache, 0, slots.to(DEVICE))
    assert bits(cache) == bits(stored(Fp8KVCache, plain)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_multiplies_by_the_scales_of_a_layer(dtype: torch.dtype) -> None:
    """By powers of two bit for bit as of numbers that are so much larger or smaller, by others nearly so."""
    shape = Shape(3, 1, 20, 16)
    given = batch(shape, [*MIXED, (1, SPLIT + 9)], dtype)
    cache, read = stored(Fp8KVCache, given.cache)
    work, numbers = work_of(shape, given), read.layers[0]
    for scales, bound in (
        (Scales(2.0, 0.25), 0),
        (Scales(1.1, 2.3), {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]),
    ):
        cache.scales = [scales]
        factors = torch.tensor(scales).view(1, 2, 1, 1, 1)
        read.layers = [(numbers.float() * factors).to(dtype)]
        found = attend(shape, given._replace(cache=cache), work)
        expected = attend(shape, given._replace(cache=read), work)
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
        assert not torch.equal(found, attend(shape, given._replace(cache=stored(Fp8KVCache, given.cache)[0]), work))


def bits(cache: TritonKVCache) -> bytes:
    return cache.layers[0].cpu().numpy().tobytes()


@pytest.mark.parametrize("cache_type", [Int8KVCache, Fp8KVCache])
@pytest.mark.parametrize(
    ("shape", "dtype"), [(Shape(6, 2, 20, 16, 9), torch.float32), (Shape(3, 1, 64, 32), torch.bfloat16)]
)
def test_attention_reads_what_was_stored(
    cache_type: type[TritonKVCache], shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as a cache with these numbers: prompts, decode in splits, and a split that is read once."""
    given = batch(shape, [*MIXED, (1, SPLIT + 9), (1, SPLIT + 1)], dtype)
    given.tables[-1, : SPLIT // shape.block_size] = given.tables[-2, : SPLIT // shape.block_size]
    cache, read = stored(cache_type, given.cache)
    coded, plain = given._replace(cache=cache), given._replace(cache=read)
    work = work_of(shape, given)
    found = attend(shape, coded, work)
    assert found.isfinite().all()
    assert torch.equal(found, attend(shape, plain, work))
    if shape.window is None:
        alone = work._replace(decode_tokens=work.decode_tokens[-2:].contiguous())
        common = torch.tensor([1], dtype=torch.int32, device=DEVICE)
        assert torch.equal(attend(shape, coded, alone._replace(common=common))[-2:], found[-2:])


def test_sizes() -> None:
    sizes: dict[str, Any] = {"head_dim": 20, "dtype": FLOAT32, "device": DEVICE}
    for cache_type, width in ((TritonKVCache, 80), (Int8KVCache, 24), (Fp8KVCache, 20)):
        cache = cache_type(3, 5, 4, 2, **sizes)
        assert sum(layer.nbytes for layer in cache.layers) == 5 * cache_type.bytes_per_block(4, 2, 20, 3, FLOAT32)
        assert cache_type.bytes_per_block(4, 2, 20, 3, FLOAT32) == 2 * 3 * 4 * 2 * width
        assert (cache.head_dim, cache.dtype) == (20, FLOAT32)
    assert len({each(1, 1, 4, 2, **sizes).layout for each in (TritonKVCache, Int8KVCache, Fp8KVCache)}) == 3


def test_a_pinned_cache_is_one_allocation(monkeypatch: pytest.MonkeyPatch):
    """torch takes a power of two of bytes for each: 30 layers of 36 MiB would be 30 of 64."""
    pinned, empty = [], torch.empty

    def without_a_gpu(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append((shape, pin_memory))
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", without_a_gpu)
    cache = TritonKVCache(3, 5, 4, 2, head_dim=8, dtype=FLOAT32, device=torch.device("cpu"), pinned=True)
    assert pinned == [((3, 5, 2, 2, 4, 8), True)]
    assert [layer.shape for layer in cache.layers] == [(5, 2, 2, 4, 8)] * 3
    assert all(layer.is_contiguous() and not layer[0].any() for layer in cache.layers)
