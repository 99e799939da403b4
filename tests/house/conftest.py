"""The product's parsed files are kept for the rules of this folder alone."""

import gc
from collections.abc import Iterator

import pytest

from tests.house.source import forget


@pytest.fixture(scope="package", autouse=True)
def trees_are_forgotten() -> Iterator[None]:
    """Turn the garbage collector off while the trees are there: it would look through their 700,000 nodes again and
    again, which took half the time of these rules."""
    gc.disable()
    yield
    forget()
    gc.enable()
