"""Elementwise functions give a number the same bits wherever it stands."""

import pytest
import torch

from kernels.whole_vectors import LANES, in_whole_vectors, is_position_independent


@pytest.mark.parametrize("function_", [torch.exp2_, torch._C._nn.silu_, torch.sigmoid_], ids=lambda f: f.__name__)
def test_bits_do_not_depend_on_position_or_threads(function_, threads):
    period = torch.randn(LANES * 63, generator=torch.Generator().manual_seed(0)) * 8
    expected = torch.cat([function_(part.clone()) for part in period.split(LANES)])
    for num_threads in (1, 2, 3, 5):
        threads(num_threads)
        for repeats in (1, 32, 33, 60, 100, 163, 331):
            result = in_whole_vectors(function_, period.repeat(repeats))
            assert torch.equal(result, expected.repeat(repeats)), (num_threads, repeats)


def test_torch_alone_does_depend_on_the_place():
    """Where this fails, torch has lost the tail that this module works round."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 8
    alone = torch.cat([number.exp2() for number in x.split(1)])
    assert not torch.equal(alone, x.exp2())


def test_function_is_applied_once_and_in_place():
    for count in (0, LANES, 40_000, 200_000 // LANES * LANES):
        x = torch.zeros(count)
        assert in_whole_vectors(lambda part: part.add_(1), x) is x
        assert (x == 1).all()


def test_a_tail_is_refused():
    with pytest.raises(AssertionError, match="17 numbers are no multiple of 32"):
        in_whole_vectors(torch.exp2_, torch.zeros(17))


def test_probe(threads):
    def marks_the_last(numbers):
        numbers[-1:] += 1
        return numbers

    for num_threads in (1, 2):
        threads(num_threads)
        assert is_position_independent(torch.exp2_)
        assert is_position_independent(torch._C._nn.silu_)
        assert not is_position_independent(marks_the_last)
