"""Parametrization by a product of choices of which the suite runs a part, and `make soak` all."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations as parameters. Those with the last axis's values in turn run; the rest are the soak's.

    Of two axes, each value of the first runs with one of the last, and each value of the last runs. Of three, each pair
    of values of two axes runs if no axis is shorter than the last.
    """
    choices = [list(axis) for axis in axes]
    return [
        pytest.param(
            *(values[place] for values, place in zip(choices, places, strict=True)),
            marks=[pytest.mark.soak] if sum(places) % len(choices[-1]) else [],
        )
        for places in product(*(range(len(values)) for values in choices))
    ]
