"""Programs that run together, and recorded calls, give what each program gives by itself."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.interpreter import programs
from tests.triton_device import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="about the interpreter")


@triton.jit
def ways_kernel(x, counts, out, N: tl.constexpr):
    """Programs end early, loop as often as a number in memory says, and change what they have read."""
    row, column = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, N)
    numbers = tl.load(x + row * N + i)
    tl.store(x + row * N + i, numbers + 1)
    count = tl.load(counts + row)
    if count < 0:
        return
    total = numbers
    for step in range(count):
        total += step + column
    while tl.max(total, 0) < 40:
        total = total * 2
    tl.store(out + (row * 2 + column) * N + i, total)


def ways(x: Any, count: int, column: int) -> Any:
    total = x + sum(step + column for step in range(count))
    while total.max() < 40:
        total = total * 2
    return total


@pytest.mark.parametrize("most", [1, 3, 64])
def test_programs_take_different_ways(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins again has changed nothing yet."""
    monkeypatch.setattr(programs, "MOST", most)
    x = torch.arange(1.0, 97).view(12, 8)
    counts = torch.tensor([3, -1, 0, 5, 3, -1, 2, 9, 1, 1, 3, 4], dtype=torch.int32)
    out, changed = torch.zeros(12, 2, 8), x.clone()
    ways_kernel[(12, 1)](changed, counts, out, N=8)
    assert torch.equal(changed, x + 1)
    for row, count in enumerate(counts.tolist()):
        assert torch.equal(out[row, 0], torch.zeros(8) if count < 0 else ways(x[row], count, 0))


def test_what_a_program_has_stored_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, programs that begin again find numbers of their own."""

    class Forgotten(list[Any]):
        def append(self, _: Any) -> None:
            """Keep nothing."""

    monkeypatch.setattr(programs, "Overwritten", Forgotten)
    x, counts = torch.zeros(4, 8), torch.tensor([1, -1, 1, -1], dtype=torch.int32)
    ways_kernel[(4, 1)](x, counts, torch.zeros(4, 2, 8), N=8)
    assert not torch.equal(x, torch.ones(4, 8))


@triton.jit
def shapes_kernel(a, b, out, places, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """Each operation that depends on axes, of numbers that differ between programs, or of one operand's alone."""
    number = tl.program_id(0)
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    left = tl.load(a + number * M * K + m[:, None] * K + k[None, :])
    same = tl.load(b + k[:, None] * N + n[None, :])
    sums = tl.dot(left, same, tl.zeros((M, N), tl.float32), input_precision="ieee")
    sums = tl.dot(tl.trans(tl.trans(left)), same * (number + 1).to(tl.float32), sums, input_precision="ieee")
    tl.store(out + number * 512 + m[:, None] * N + n[None, :], sums)
    out += number * 512 + M * N
    tl.store(out + n, tl.sum(sums, 0))
    tl.store(out + N + m, tl.max(sums, 1))
    tl.store(out + N + M, tl.min(sums))
    tl.store(places + number * 64 + m, tl.argmax(sums, 1))
    counted = tl.cumsum(tl.where(sums > number, 1, 0), 1)
    tl.store(places + number * 64 + M + m, tl.sum(counted, 1))
    first, second = tl.split(tl.reshape(sums, (M, N // 2, 2)))
    both = tl.interleave(second, first)
    tl.store(out + N + M + 1 + m[:, None] * N + n[None, :], both)
    picked = tl.gather(sums, tl.broadcast_to(m[:, None] % N, (M, N)), 1)
    tl.store(out + N + M + 1 + M * N + m[:, None] * N + n[None, :], picked)


def test_operations_with_axes() -> None:
    count, m, k, n = 5, 4, 16, 8
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, size).astype(np.float32) for size in ((count, m, k), (k, n)))
    out, places = torch.zeros(count, 512), torch.zeros(count, 64, dtype=torch.int32)
    shapes_kernel[(count,)](torch.from_numpy(a), torch.from_numpy(b), out, places, M=m, K=k, N=n)
    for number in range(count):
        sums = a[number] @ b * (number + 2)
        both = sums.reshape(m, n // 2, 2)[:, :, ::-1].reshape(m, n)
        parts = sums, sums.sum(0), sums.max(1), sums.min(), both, np.repeat(sums[range(m), range(m)], n)
        expected = np.concatenate([np.ravel(part) for part in parts])
        assert np.array_equal(out[number, : len(expected)].numpy(), expected)
        counted = np.cumsum(sums > number, 1).sum(1)
        assert places[number, : 2 * m].tolist() == [*sums.argmax(1), *counted]


@triton.jit
def scalars_kernel(x, out, others, ONE: tl.constexpr, N: tl.constexpr):
    """Calls that differ in what is no tensor, in a number, or in whether two operands are the same."""
    other = tl.load(others)
    number = tl.program_id(0)
    i = tl.arange(0, N)
    row = tl.load(x + i)
    out += number * 6 * N
    tl.store(out + i, tl.load(x + i, mask=i < 2, other=other))
    tl.store(out + N + i, tl.load(x + number, mask=number < 0, other=other) + tl.zeros((N,), tl.float32))
    tl.store(out + 2 * N + i, row - row)
    tl.store(out + 3 * N + i, row - (row + i))
    tl.store(out + 4 * N + i, row * ONE)
    tl.store(out + 5 * N + i, tl.where(i < number, row, ONE))


@pytest.mark.parametrize("other", [0.0, 3.5, -0.0])
@pytest.mark.parametrize("one", [1, True, 1.0, 2, 0.5])
def test_recorded_calls_are_told_from_each_other(other: float, one: float) -> None:
    """A scalar of 0 is no missing one, and a row without itself is no case of two rows."""
    row = torch.tensor([3.0, -1.0, 0.5, 7.0])
    out = torch.zeros(3, 6, 4)
    scalars_kernel[(3,)](row, out, torch.tensor([other]), ONE=one, N=4)
    i = torch.arange(4)
    for number in range(3):
        masked = torch.where(i < 2, row, torch.tensor(other))
        expected = [
            masked,
            torch.full((4,), other),
            row - row,
            row - (row + i),
            row * one,
            torch.where(i < number, row, one),
        ]
        assert torch.equal(out[number], torch.stack(expected))


@triton.jit
def divided_kernel(x, out, MOST: tl.constexpr):
    """Numbers as the compiler's: sums of bytes wrap, divisions go towards 0, and small types stay small."""
    i = tl.arange(0, 8)
    numbers = tl.load(x + tl.program_id(0) * 8 + i)
    tl.store(out + i, numbers // MOST + numbers % MOST)
    tl.store(out + 8 + i, (numbers.to(tl.uint8) + numbers.to(tl.uint8)).to(tl.int32))
    tl.store(out + 16 + i, (numbers.to(tl.int8) >> 1).to(tl.int32))
    tl.store(out + 24 + i, ((numbers > 0) & (numbers < 100)).to(tl.int32))


def test_types_are_those_of_the_language() -> None:
    x, out = torch.tensor([-7, 7, 200, 255, -1, 0, 128, 3], dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
    divided_kernel[(1,)](x, out, MOST=3)
    numbers = x.numpy()
    quotients = np.trunc(numbers / 3).astype(np.int32)
    assert out[0].tolist() == (quotients + numbers - 3 * quotients).tolist()
    assert out[1].tolist() == (2 * numbers % 256).tolist()
    assert out[2].tolist() == (numbers.astype(np.int8) >> 1).tolist()
    assert out[3].tolist() == [0, 1, 0, 0, 0, 0, 0, 1]


def test_a_kernels_error_is_told() -> None:
    with pytest.raises(TypeError, match=r"divided_kernel\(\) lacks \['out', 'MOST'\]"):
        divided_kernel[(1,)](torch.zeros(8, dtype=torch.int32))
