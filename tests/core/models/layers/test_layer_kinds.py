"""A kind of layer is one number, in Python and in C: the index of what a step has for it."""

import msgspec
import numpy as np
import pytest

from core.models.layers.layer_kinds import kind_of, windows
from core.models.layers.rotary import of_each_kind, rotary_embeddings
from tests.core.runner.invariance import TINY


@pytest.mark.parametrize(
    ("sliding", "expected", "kinds"),
    [((), (None,), [0, 0]), ((0, 1), (7,), [0, 0]), ((0,), (None, 7), [1, 0]), ((1,), (None, 7), [0, 1])],
)
def test_a_kind_is_an_index_of_those_there_are(
    sliding: tuple[int, ...], expected: tuple[int | None, ...], kinds: list[int]
) -> None:
    config = msgspec.structs.replace(TINY, num_hidden_layers=2, sliding_window=7, sliding_layers=sliding)
    assert windows(config) == expected
    assert [kind_of(config, layer) for layer in range(2)] == kinds


def test_there_is_a_rotary_embedding_for_each_kind_and_shared_ones_are_made_once() -> None:
    config = msgspec.structs.replace(TINY, num_hidden_layers=2, sliding_window=7, sliding_layers=(1,))
    shared = rotary_embeddings(msgspec.structs.replace(config, sliding_rope_theta=None))
    own = rotary_embeddings(msgspec.structs.replace(config, sliding_rope_theta=5.0))
    alone = rotary_embeddings(msgspec.structs.replace(config, sliding_rope_theta=5.0, sliding_layers=(0, 1)))
    assert (len(shared), len(own), len(alone)) == (2, 2, 1)
    assert shared[0] is shared[1]
    assert np.array_equal(alone[0].frequencies, own[1].frequencies)
    assert not np.array_equal(own[0].frequencies, own[1].frequencies)
    made = of_each_kind(lambda rotary: [rotary], shared)
    assert made[0] is made[1]
    assert len({id(one) for one in of_each_kind(lambda rotary: [rotary], own)}) == 2
