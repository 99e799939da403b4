"""Routing: how a routed MLP chooses experts for a row; kernels/cpu/c/layers/routing.h has the definition."""

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.arrays import Floats


class Routing(NamedTuple):
    """The constants for choosing among experts by their scores."""

    num_chosen: int  # experts per row
    normalises: bool  # the weights of a row's experts sum to 1 before they are scaled
    is_sigmoid: bool = False  # scores are sigmoids of the router's numbers, otherwise their softmax
    num_groups: int = 1  # of consecutive experts
    num_chosen_groups: int = 1  # groups whose experts can be chosen
    best_of_group: int = 1  # this many of a group's largest numbers are added up to choose groups
    scaling: float = 1.0  # of the weights
    correction: Floats | None = None  # [experts] is added to the scores that choose, and not to weights
    added_to_sum: float = 0.0  # of weights that are normalised
    scales: Floats | None = None  # [experts] of the experts' weights, after all else
    scales_inputs: bool = False  # weights are of what the experts read, and not of their results
    has_shared_gate: bool = False  # the router's last number is that of the shared expert's gate


def _unchanged(columns: Any) -> Any:
    return columns


class ExpertColumns(NamedTuple):
    """Functions (own columns [n, own width]) -> columns of all ranks [n, width], if each has some of every expert's.

    activated: of the activations of chosen experts. shared: of those of the shared expert. summed: of the sums.
    """

    activated: Callable[[Any], Any] = _unchanged
    shared: Callable[[Any], Any] = _unchanged
    summed: Callable[[Any], Any] = _unchanged
