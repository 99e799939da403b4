"""The variant amx: its products follow AMX's recipe to the bit, real or emulated; its attention; who may have it."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

import kernels.cpu.build
from kernels.cpu.build import (
    AMX,
    VARIANTS,
    CannotCompileError,
    check_instructions,
    find_compiler,
    has_amx,
    runnable_variants,
    usable_variants,
)
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.library_file import find_library
from kernels.cpu.quantized import quantize
from kernels.dequantize import BLOCK_SIZES
from kernels.elements import BFLOAT16, FLOAT32
from tests.kernels.attention_reference import reference_attention
from tests.kernels.block_scales import INTEGER_TYPES, TYPES, set_scales
from tests.kernels.cpu.test_attention import CpuBench, attention_of
from tests.kernels.cpu.test_int8 import packed
from tests.kernels.cpu.test_quantized import numbers
from tests.kernels.cpu.test_quantized import ordinary as ordinary_weights

needs_avx512 = pytest.mark.skipif("amx" not in runnable_variants(), reason="the variant amx needs AVX-512")

Singles = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
MIN_NORMAL = np.float64(2.0**-126)


@pytest.fixture(scope="module")
def library() -> Iterator[CpuLibrary]:
    library = load_cpu_library("amx")
    yield library
    library.stop_threads()


def singles(bits: Halves) -> Singles:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def flushed(x: Singles) -> Singles:
    """Denormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < np.float32(MIN_NORMAL), np.copysign(np.float32(0), x), x)


def fma(a: Singles, b: Singles, c: Singles) -> Singles:
    """a * b + c of numbers that are not denormal, rounded once, to nearest even; denormal results are zeros.

    In float64 the product is exact. The sum is rounded to odd there, so only rounding it to float32 counts. Whether the
    result is denormal is decided after rounding, as if exponents had no least one."""
    product, other = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + other
    part = total - product
    error = (product - (total - part)) + (other - part)
    bits = total.view(np.int64)
    is_even = (bits & 1 == 0) & (error != 0) & np.isfinite(total)
    towards = np.where((error > 0) == (total > 0), bits + 1, bits - 1)
    total = np.where(is_even, towards, bits).view(np.float64)
    wide = (np.where(np.abs(total) < 1, total, 0) * 2.0**64).astype(np.float32)  # small ones, without a least exponent
    is_small = (np.abs(total) < 1) & (np.abs(wide) < np.float32(MIN_NORMAL * 2.0**64))
    return np.where(is_small, np.copysign(np.float32(0), total.astype(np.float32)), total.astype(np.float32))


def recipe(x: Halves, weight: Halves) -> Singles:
    """The product [rows, columns] of x [rows, depth] and weight [columns, depth], as amx.h defines it."""
    depth = -(-x.shape[1] // 32) * 32
    x, weight = (np.pad(m, ((0, 0), (0, depth - m.shape[1]))) for m in (x, weight))
    left, right = flushed(singles(x)), flushed(singles(weight))
    total = np.zeros((len(x), len(weight)), np.float32)
    one = np.ones_like(total)
    for tile in range(0, depth, 32):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(tile, tile + 32):
            chains[k % 2] = fma(left[:, k, None], right[None, :, k], chains[k % 2])
        total = fma(total, one, fma(chains[0], one, chains[1]))
    return total


def ordinary(rng: np.random.Generator, shape: tuple[int, int]) -> Halves:
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def any_bits(rng: np.random.Generator, shape: tuple[int, int]) -> Halves:
    return rng.integers(0, 1 << 16, shape, np.uint16)


def wide_exponents(rng: np.random.Generator, shape: tuple[int, int]) -> Halves:
    """Finite, of all magnitudes."""
    return any_bits(rng, shape) & np.uint16(0xBFFF)


def near_the_least(rng: np.random.Generator, shape: tuple[int, int]) -> Halves:
    """Numbers whose products lie about the least normal one, many of which cancel; some denormal."""
    exponents = rng.choice(np.array([0, 62, 63, 64, 65], np.uint16), shape)
    return (rng.integers(0, 2, shape, np.uint16) << 15) | (exponents << 7) | rng.integers(0, 8, shape, np.uint16) << 4


def few_values(rng: np.random.Generator, shape: tuple[int, int]) -> Halves:
    """Ones, signs, zeros of both signs and ulps: ties and cancellation."""
    return rng.choice(np.array([0x3F80, 0xBF80, 0x3F81, 0xBF81, 0x3C00, 0xBC00, 0, 0x8000], np.uint16), shape)


def with_infinities(rng: np.random.Generator, shape: tuple[int, int]) -> Halves:
    special = rng.choice(np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFA3, 0, 0x8000], np.uint16), shape)
    return np.where(rng.random(shape) < 0.01, special, ordinary(rng, shape))


Kind = Callable[[np.random.Generator, tuple[int, int]], Halves]
KINDS: list[Kind] = [ordinary, any_bits, wide_exponents, near_the_least, few_values, with_infinities]


def product(library: CpuLibrary, x: Halves, weight: Halves) -> npt.NDArray[np.uint32]:
    """The bits of the kernels' product, in float32."""
    matrix = PackedMatrix(library, weight.view(BFLOAT16), out_dtype=FLOAT32, is_kept=True)
    return np.asarray(matrix(x.view(BFLOAT16))).view(np.uint32).copy()


@needs_avx512
@pytest.mark.parametrize("kind", KINDS)
def test_products_follow_the_recipe_to_the_bit(library: CpuLibrary, kind: Kind) -> None:
    rng = np.random.default_rng(1)
    for rows, columns, depth in [(37, 70, 160), (16, 32, 75), (1, 5, 31), (33, 40, 2)]:
        x, weight = kind(rng, (rows, depth)), kind(rng, (columns, depth))
        with np.errstate(all="ignore"):
            expected = recipe(x, weight)
        got = product(library, x, weight).view(np.float32)
        is_nan = np.isnan(expected)
        assert np.array_equal(np.isnan(got), is_nan)
        assert np.array_equal(got.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


@needs_avx512
def test_the_comparison_sees_rounding_order_and_denormals(library: CpuLibrary) -> None:
    """The variant avx512 sums in another order, and keeps denormal numbers."""
    rng, other = np.random.default_rng(2), load_cpu_library("avx512")
    for kind in (ordinary, near_the_least):
        x, weight = kind(rng, (20, 96)), kind(rng, (40, 96))
        assert not np.array_equal(product(library, x, weight), product(other, x, weight)), kind


#: Rows and columns with which x is copied to tiles, and whole weights too; and these alone.
MANY = ((260, 800, 75), (260, 800, 96), (256, 96, 160))


@pytest.mark.skipif(not has_amx(), reason="this machine has no AMX, or does not grant it")
def test_the_instructions_give_the_emulated_bits() -> None:
    """NaN too. 2e6 sums of each kind, on all rows and columns of tiles that are whole and that are not."""
    library, rng = load_cpu_library("amx"), np.random.default_rng(3)
    use = library.function("amx_use", ctypes.c_int)
    for kind in KINDS:
        for rows, columns, depth in [
            (512, 256, 32),
            (512, 256, 512),
            (511, 255, 75),
            (1, 64, 576),
            (17, 64, 576),
            *MANY,
        ]:
            x, weight = kind(rng, (rows, depth)), kind(rng, (columns, depth))
            bits = []
            for is_real in (1, 0):
                use(is_real)
                bits.append(product(library, x, weight))
            use(1)
            assert np.array_equal(*bits), (kind, rows, columns, depth)


@pytest.mark.skipif(not has_amx(), reason="this machine has no AMX, or does not grant it")
@pytest.mark.parametrize(("heads", "block_size"), [((9, 3, 64), 16), ((4, 1, 128), 32), ((9, 1, 80), 8)], ids=str)
@pytest.mark.parametrize("window", [None, 139])
def test_attention_by_the_instructions_has_the_emulated_bits(
    heads: tuple[int, int, int], block_size: int, window: int | None
) -> None:
    library = load_cpu_library("amx")
    use, attention = library.function("amx_use", ctypes.c_int), attention_of(library)
    outputs = []
    for is_real in (1, 0):
        use(is_real)
        bench = CpuBench((600,), heads, torch.bfloat16, 0, block_size, window)
        outputs.append(bench.run(0, [560, 1, 39], attention=attention))
    use(1)
    assert torch.equal(*outputs)


@needs_avx512
@pytest.mark.parametrize("heads", [(6, 2, 64), (2, 2, 144)], ids=str)
def test_attention_does_not_depend_on_the_size_of_blocks(library: CpuLibrary, heads: tuple[int, int, int]) -> None:
    """Values are summed over 32 tokens at a time, also where a block has 16 or the cache has none after the 16th."""
    outputs = [
        CpuBench((545,), heads, torch.bfloat16, 0, size).run(0, [500, 45], attention=attention_of(library))
        for size in (8, 16, 32)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])


@pytest.mark.skipif(not has_amx(), reason="this machine has no AMX, or does not grant it")
@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_products_of_codes_by_the_instructions_have_the_emulated_bits(name: str) -> None:
    library, x = load_cpu_library("amx"), numbers(140)
    use, matrix = (
        library.function("amx_use", ctypes.c_int),
        packed(library, [ordinary_weights(name, 40)], out_dtype=FLOAT32),
    )
    for rows in (9, 17, 32, 140):
        bits = []
        for is_real in (1, 0):
            use(is_real)
            bits.append(matrix(x[:rows]).view(np.uint32).copy())
        use(1)
        assert np.array_equal(*bits), rows


@pytest.mark.skipif(not has_amx(), reason="this machine has no AMX, or does not grant it")
@pytest.mark.parametrize("name", TYPES)
def test_quantized_products_by_the_instructions_have_the_emulated_bits(name: str) -> None:
    """The functions of all variants unpack for the emulation. Some scales are as small or large as they can be."""
    library, x = load_cpu_library("amx"), numbers(40)
    use, rows = library.function("amx_use", ctypes.c_int), ordinary_weights(name, 128)
    blocks = rows.data.reshape(128, -1, BLOCK_SIZES[name][1])
    for row, scale in ((3, 0.0), (40, 2**-24), (70, -60000.0), (101, 2.0**-110)):
        set_scales(blocks[row : row + 1, -1], name, scale)
    set_scales(blocks[37:38], name, -0.0)  # what is not 0 of such a column would be its only sum
    stored = quantize(library, [rows])
    assert stored is not None
    matrix = PackedMatrix(library, stored, out_dtype=FLOAT32)
    odd = x[:1].copy()
    nan, inf = (0x7FC1, 0xFF81), (0x7F80, 0xFF80)
    odd[0, [5, 70, 71, 72]] = np.array([*nan, *inf], np.uint16).view(odd.dtype)
    for rows_of_x in (x[:1], odd, x[:16], x[:17], x):
        bits = []
        for is_real in (1, 0):
            use(is_real)
            bits.append(matrix(rows_of_x).view(np.uint32).copy())
        use(1)
        assert np.array_equal(*bits), len(rows_of_x)


@needs_avx512
@pytest.mark.parametrize(("rows", "depth"), [(300, 64), (70, 16384), (20, 65600)], ids=str)
def test_many_rows_and_deep_products_of_codes_have_the_bits_of_another_variant(
    library: CpuLibrary, rows: int, depth: int
) -> None:
    """Rows are stored together in chunks, which a thread has room for; of the deepest products it has not."""
    weights, x = ordinary_weights("Q4_1", 40, depth), numbers(rows, depth)
    results = [
        packed(variant, [weights], out_dtype=FLOAT32)(x).view(np.uint32).copy()
        for variant in (library, load_cpu_library("avx512"))
    ]
    assert np.array_equal(*results)


@needs_avx512
@pytest.mark.parametrize("heads", [(9, 3, 64), (9, 1, 80), (4, 2, 12), (2, 2, 256)], ids=str)
def test_attention_equals_a_float64_loop(library: CpuLibrary, heads: tuple[int, int, int]) -> None:
    outputs = []
    for function in (attention_of(library), reference_attention):
        bench = CpuBench((560, 1, 64), heads, torch.bfloat16, seed=3)
        first = bench.step({0: 530, 1: 1, 2: 60}, function)
        second = bench.step({2: 1, 0: 30}, function)
        outputs.append(torch.cat([*first.values(), *second.values()]).double())
    assert (outputs[0] - outputs[1]).abs().max() < 2e-2


@needs_avx512
@pytest.mark.parametrize(("block_size", "window"), [(16, None), (8, 139), (32, 17)])
def test_attention_does_not_depend_on_how_a_context_came(
    library: CpuLibrary, block_size: int, window: int | None
) -> None:
    attention, heads = attention_of(library), (10, 2, 48)
    usual = CpuBench((540,), heads, torch.bfloat16, 0, window=window).run(0, [540], attention=attention)
    library.start_threads(2)
    for seed, chunks in enumerate([[500, 1, 1, 38], [13] * 41 + [7]]):
        bench = CpuBench((540, 90), heads, torch.bfloat16, seed, block_size, window)
        assert torch.equal(bench.run(0, chunks, others=((1, 30),), attention=attention), usual)
    library.stop_threads()


@needs_avx512
def test_the_compiled_functions_take_tiles_and_give_them_back() -> None:
    """By the disassembler: AMX's instructions are in these functions only. Products give their tiles back, and
    attention does after its last item."""
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump")
    file = find_library("amx").path
    listing = subprocess.run(["objdump", "-d", file], capture_output=True, text=True, check=True).stdout
    used: dict[str, set[str]] = {}
    for text in re.split(r"\n\n(?=[0-9a-f]+ <)", listing):
        name = re.search(r"<(\w+)", text)
        words = set(re.findall(r"\b(tdpbf16ps|tdpbssd|ldtilecfg|tilerelease|tileload\w+|tilestored|tilezero)\b", text))
        if name and words:
            used[name[1]] = words
    common = {"ldtilecfg", "tilerelease", "tileloadd", "tilestored", "tilezero"}
    assert used == {
        "multiply_real": common | {"tdpbf16ps", "tileloaddt1"},
        "begin_attention": {"ldtilecfg"},
        "attend_real": common - {"ldtilecfg", "tilerelease"} | {"tdpbf16ps", "tileloaddt1"},
        "end_attention": {"tilerelease"},
        "multiply_codes_real": (common - {"tilezero"}) | {"tdpbssd"},
    }
    assert re.search(r"tdpbf16ps %tmm6,%tmm4,%tmm0", listing), "sums, rows of x, weights, in the assembler's order"
    assert re.search(r"tdpbf16ps %tmm5,%tmm6,%tmm2", listing), "sums, weights on the left, a row of x"
    assert re.search(r"tdpbssd %tmm4,%tmm2,%tmm0", listing), "sums, rows of x, codes"


def words_of_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: frozenset[str]) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: GenuineIntel\nflags\t: {' '.join(sorted(words))}\n")
    monkeypatch.setattr(kernels.cpu.build, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(kernels.cpu.build.platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize("refusal", [0, 1, 28])
def test_amx_is_the_best_variant_where_the_kernel_grants_it(
    refusal: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words_of_a_cpu(monkeypatch, tmp_path, VARIANTS["avx512bf16"].needs | AMX)
    monkeypatch.setattr(kernels.cpu.build, "request_amx", lambda: refusal)
    others = ["avx512", "avx512bf16", "avx2", "portable"]
    assert usable_variants() == (others if refusal else ["amx", *others])
    assert set(runnable_variants()) == {"amx", *others}


def test_a_cpu_without_amx_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words_of_a_cpu(monkeypatch, tmp_path, VARIANTS["avx512"].needs)
    monkeypatch.setattr(kernels.cpu.build, "request_amx", None)
    assert usable_variants() == ["avx512", "avx2", "portable"]


def test_what_the_kernel_answers_is_kept() -> None:
    assert kernels.cpu.build.request_amx() == kernels.cpu.build.request_amx()
    assert has_amx() == (usable_variants()[0] == "amx")


@pytest.fixture
def old_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler from before AMX, for sources that compile in a moment; the CPU has AMX."""
    compiler, sources = tmp_path / "old-cc", tmp_path / "sources"
    refuses = 'case "$*" in *-mamx*) echo "unrecognized option"; exit 1 ;; esac'
    compiler.write_text(f'#!/bin/sh\n{refuses}\nexec cc "$@"\n')
    compiler.chmod(0o755)
    sources.mkdir()
    (sources / "nothing.c").write_text("int nothing;\n")
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels.cpu.build, "SOURCE_FOLDER", sources)
    monkeypatch.setattr(kernels.cpu.library_file, "PREBUILT_FOLDER", tmp_path)
    words_of_a_cpu(monkeypatch, tmp_path, VARIANTS["avx512"].needs | AMX)
    monkeypatch.setattr(kernels.cpu.build, "request_amx", lambda: 0)


@pytest.mark.usefixtures("old_compiler")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="compiles for x86-64")
def test_a_compiler_that_does_not_know_amx_builds_the_next_variant() -> None:
    assert usable_variants()[0] == "amx"
    assert find_library().variant == "avx512"
    with pytest.raises(CannotCompileError, match="old-cc does not support the instructions of the variant amx"):
        find_library("amx")


@pytest.mark.usefixtures("old_compiler")
def test_no_compiler_at_all_is_said_of_the_next_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel that was built without amx has the next one."""
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CannotCompileError, match="no C compiler: no-such-compiler"):
        find_library()


def test_a_compiler_knows_its_instructions() -> None:
    compiler = find_compiler()
    for variant in ("avx512", "avx2", "portable"):
        check_instructions(variant, compiler)
    with pytest.raises(CannotCompileError, match="no-such-compiler does not support"):
        check_instructions("amx", compiler._replace(command=("no-such-compiler",)))
