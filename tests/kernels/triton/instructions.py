"""Rules for the machine code of products: what numerics level L2 needs, and the interpreter cannot show."""

import re
from collections.abc import Iterable

#: Products of 16-bit floats that add 16 neighbours of K to a float32 sum.
_PRODUCTS = (
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(bf16\.bf16|f16\.f16)",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16\.bf16|f16\.f16)\.f32",
    r"tcgen05\.mma\.cta_group::1\.kind::f16",
)
#: Products of 8-bit floats, by compute capability: on each, of one kind.
_FP8_PRODUCTS = {
    89: r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32",
    90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3",
    100: r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4",
    120: r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32",
}
_ANY = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]+")
_ATOMIC = re.compile(r"\b(?:atom|red)\.\S+")
_SUM = re.compile(r"\b(?:add|sub|fma)(?:\.\w+)*\.f32(?:x2)?\b")
#: What devices approximate, each kind of them in its own way.
_APPROXIMATE = re.compile(r"\b(?:ex2|lg2|sin|cos|tanh|rcp|rsqrt|sqrt|div)\.(?:approx|full)\S*")
#: Numbers that are 0 because they are small.
_FLUSHED = re.compile(r"\b\w+(?:\.\w+)*\.ftz\S*")
_ASYNC = re.compile(r"wgmma\.mma_async\S+ \{([^}]*)\}, (%rd\d+), (%rd\d+)")


def assert_allowed(ptx: str) -> None:
    """Of every kernel: no sum depends on which program is first, and tensor cores add 16 neighbours of K."""
    _assert_products(ptx, _PRODUCTS)
    assert not _ATOMIC.search(ptx), _ATOMIC.search(ptx)


def _assert_products(ptx: str, allowed: Iterable[str]) -> None:
    others = {name for name in _ANY.findall(ptx) if not any(re.fullmatch(each, name) for each in allowed)}
    assert not others, others


def assert_defined(ptx: str) -> None:
    """Of every kernel that computes logits: each result of an instruction is defined, so that a CPU can compute it."""
    found = [*_APPROXIMATE.findall(ptx), *_FLUSHED.findall(ptx)]
    assert not found, sorted(set(found))


def assert_one_chain(ptx: str, *, is_float: bool, ends: bool) -> None:
    """Of an ordered product: only the products themselves add, from low K to high; if it ends there, nothing else does.

    One with a bias or an activation goes on.
    """
    assert_allowed(ptx)
    sums = {name for name in _SUM.findall(ptx) if not (is_float and name.startswith("fma"))}
    assert not (ends and sums), sums
    assert bool(_ANY.search(ptx)) != is_float
    _assert_ascending(ptx)


def assert_parts(ptx: str, capability: int, *, has_bias: bool) -> None:
    """Of a product of 8-bit floats: one kind of products, from low K to high, and multiply-adds of their sums.

    Two kinds may cut their sums at different places.
    """
    _assert_products(ptx, (_FP8_PRODUCTS[capability],))
    assert not _ATOMIC.search(ptx), _ATOMIC.search(ptx)
    assert _ANY.search(ptx)
    sums = {name.removesuffix("x2") for name in _SUM.findall(ptx)}  # Blackwell has instructions for two at once
    assert sums == {"fma.rn.f32", *(("add.rn.f32",) if has_bias else ())}, sums
    _assert_ascending(ptx)


def _assert_ascending(ptx: str) -> None:
    chains: dict[str, list[tuple[int, int]]] = {}
    for accumulator, left, right in _ASYNC.findall(ptx):
        chains.setdefault(accumulator, []).append((_offset(left, ptx), _offset(right, ptx)))
    for places in chains.values():
        for operand in zip(*places, strict=True):
            assert list(operand) == sorted(set(operand)), operand


def _offset(register: str, ptx: str) -> int:
    """The constant that is added to the address in a descriptor of shared memory: 2 for each 16 neighbours of K."""
    while True:
        found = re.findall(rf"(?m)^\s+(\S+)\s+{re.escape(register)}, ([^;]*);", ptx)
        assert len(found) == 1, (register, found)
        name, operands = found[0]
        if name == "add.s32" and (last := operands.split(", ")[-1]).isdigit():
            return int(last)
        if name not in ("or.b64", "cvt.u64.u32"):
            return 0
        register = operands.split(", ")[0]
